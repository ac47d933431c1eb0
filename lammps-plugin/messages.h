// SPDX-License-Identifier: GPL-2.0-or-later

#pragma once

#include <exception>
#include <string>

namespace metatomic_tc::lammps {

/// The message of an exception of torch, metatomic or the standard library in one line, without
/// the traces of TorchScript and C++.
std::string one_line(const std::exception &error);

} // namespace metatomic_tc::lammps
