// SPDX-License-Identifier: GPL-2.0-or-later

#include "model_file.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>

#include <caffe2/serialize/inline_container.h>

namespace metatomic_tc::lammps {

void check_file(const std::string &path) {
  const std::string export_it =
      "; give the .pt file that \"metatomic-tc export\" or \"mtt export\" "
      "wrote";
  if (std::filesystem::is_directory(path))
    throw std::runtime_error(path + " is a directory, not a model" + export_it);
  std::ifstream file(path, std::ios::binary);
  if (!file.good())
    throw std::runtime_error("cannot read the model file " + path +
                             ": it was looked for from the current directory and in those of "
                             "LAMMPS_POTENTIALS");
  std::string start(2, '\0');
  file.read(start.data(), 2);
  file.close();

  const auto ends_with = [&](const std::string &end) {
    return path.size() >= end.size() &&
           path.compare(path.size() - end.size(), end.size(), end) == 0;
  };
  const std::string is_checkpoint =
      path + " is a checkpoint, not an exported model: run \"metatomic-tc export " + path +
      "\" and use the .pt file it writes";
  std::optional<caffe2::serialize::PyTorchStreamReader> archive;
  try {
    archive.emplace(path);
  } catch (const std::exception &) {
    if (ends_with(".ckpt"))
      throw std::runtime_error(is_checkpoint);
    if (start == "PK")
      throw std::runtime_error(path + " is not a metatomic model: it is a damaged or incomplete "
                                      "archive; copy or download the file again");
    throw std::runtime_error(path +
                             " is not a metatomic model: it is not a TorchScript file at "
                             "all" +
                             export_it);
  }
  if (!archive->hasRecord("constants.pkl")) {
    if (archive->hasRecord("data.pkl"))
      throw std::runtime_error(is_checkpoint);
    throw std::runtime_error(path +
                             " is not a metatomic model: it is an archive without a "
                             "TorchScript module in it" +
                             export_it);
  }
  if (!archive->hasRecord("extra/metatomic-version")) {
    if (archive->hasRecord("extra/metatensor-version"))
      throw std::runtime_error(path +
                               " is a model for metatensor, from before metatomic: export it "
                               "again from its checkpoint, with \"metatomic-tc export\"");
    throw std::runtime_error(path + " is not a metatomic model: it is a TorchScript file that was "
                                    "not written by metatomic's AtomisticModel.save");
  }
}

} // namespace metatomic_tc::lammps
