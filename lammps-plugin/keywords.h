// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include "model.h"

#include <string>

namespace LAMMPS_NS {
class LAMMPS;
}

namespace metatomic_tc::lammps {

/// What the arguments of pair_style say.
struct Settings {
  ModelOptions options;
  /// Factor on energies, forces and virial.
  double scale = 1.0;
};

/// Reads MODE [keyword value ...]; the keywords are those of the table in keywords.cpp.
/// @return what is wrong with the arguments; "" if nothing
std::string parse_settings(int narg, char **arg, LAMMPS_NS::LAMMPS *lmp, Settings &settings);

} // namespace metatomic_tc::lammps
