// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include <string>

namespace metatomic_tc::lammps {

/// Tells apart what users give instead of an exported model.
/// @throws std::runtime_error saying what `path` is and what to give
void check_file(const std::string &path);

} // namespace metatomic_tc::lammps
