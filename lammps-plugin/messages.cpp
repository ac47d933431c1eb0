// SPDX-License-Identifier: GPL-2.0-or-later

#include "messages.h"

#include <sstream>

#include <c10/util/Exception.h>

namespace metatomic_tc::lammps {

std::string one_line(const std::exception &error) {
  std::string text = error.what();
  if (const auto *torch_error = dynamic_cast<const c10::Error *>(&error))
    text = torch_error->what_without_backtrace();

  // TorchScript: a trace of the model's code, and at its end the exception that matters.
  for (const char *marker : {"RuntimeError: ", "torch.jit.Error: ", "builtins."}) {
    const auto position = text.rfind(marker);
    if (position != std::string::npos)
      text = text.substr(position + std::string(marker).size());
  }
  const auto trace = text.find("\nException raised from");
  if (trace != std::string::npos)
    text = text.substr(0, trace);

  std::istringstream words(text);
  std::string line;
  for (std::string word; words >> word;)
    line += (line.empty() ? "" : " ") + word;
  return line.empty() ? "unknown error" : line;
}

} // namespace metatomic_tc::lammps
