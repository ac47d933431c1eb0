// SPDX-License-Identifier: GPL-2.0-or-later

#include "keywords.h"

#include "messages.h"

#include "platform.h"
#include "pointers.h"
#include "utils.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <string_view>

using namespace LAMMPS_NS;

namespace metatomic_tc::lammps {

/// A keyword as it was given, and where its value goes.
struct Given {
  const std::string &keyword, &value;
  Settings &settings;
  LAMMPS *lmp;

  bool yes() const { return value == "yes" || value == "on" || value == "true"; }
  bool no() const { return value == "no" || value == "off" || value == "false"; }
  std::string must_be(const std::string &what) const {
    return keyword + " must be " + what + ", not '" + value + "'";
  }
};

/// The sentence of what `check` throws; "" if it does not.
template <typename Check> static std::string problem_of(const Check &check) {
  try {
    check();
  } catch (const std::exception &invalid) {
    return one_line(invalid);
  }
  return "";
}

// Parsers store a value, or say what is wrong with it.

static std::string parse_device(const Given &given) {
  const auto &value = given.value;
  const bool numbered = value.size() > 5 && value.size() < 9 && value.compare(0, 5, "cuda:") == 0 &&
                        value.find_first_not_of("0123456789", 5) == std::string::npos;
  if (value != "cpu" && value != "cuda" && !numbered)
    return given.must_be("cpu, cuda or cuda:N");
  given.settings.options.device = value;
  return "";
}

static std::string parse_extensions(const Given &given) {
  if (!platform::path_is_directory(given.value))
    return "extensions '" + given.value + "' is not a directory";
  given.settings.options.extensions = given.value;
  return "";
}

template <bool ModelOptions::*flag> static std::string parse_flag(const Given &given) {
  if (!given.yes() && !given.no())
    return given.must_be("yes or no");
  given.settings.options.*flag = given.yes();
  return "";
}

static std::string parse_layers(const Given &given) {
  const std::string problem = problem_of([&] { check_layers(given.value); });
  if (!problem.empty())
    return "layers '" + given.value + "': " + problem;
  given.settings.options.layers = given.value;
  return "";
}

static std::string parse_scale(const Given &given) {
  if (!utils::is_double(given.value))
    return given.must_be("a number");
  given.settings.scale = utils::numeric(FLERR, given.value, false, given.lmp);
  return "";
}

static std::string parse_variant(const Given &given) {
  std::string output = given.keyword.size() > 8 ? given.keyword.substr(8) : "";
  if (output == "non_conservative_forces")
    output = "non_conservative_force";
  if (!given.settings.options.variants.emplace(output, given.no() ? "" : given.value).second)
    return "variant/non_conservative_force and variant/non_conservative_forces are the same, give "
           "one of them";
  return "";
}

static std::string parse_non_conservative(const Given &given) {
  const auto &value = given.value;
  if (!given.yes() && !given.no() && value != "forces" && value != "stress")
    return given.must_be("on, off, forces or stress");
  given.settings.options.direct_forces = given.yes() || value == "forces";
  given.settings.options.direct_stress = given.yes() || value == "stress";
  return "";
}

static std::string parse_uncertainty_threshold(const Given &given) {
  auto &options = given.settings.options;
  options.uncertainty = !given.no();
  if (given.no())
    return "";
  if (!utils::is_double(given.value) || utils::numeric(FLERR, given.value, false, given.lmp) <= 0.0)
    return given.must_be("a number above 0 or off");
  options.uncertainty_threshold = utils::numeric(FLERR, given.value, false, given.lmp);
  return "";
}

static std::string parse_memory(const Given &given) {
  auto &memory = given.settings.options.memory;
  if (given.value == "auto")
    memory = ModelOptions::MemoryUse::automatic;
  else if (given.value == "fast")
    memory = ModelOptions::MemoryUse::fast;
  else if (given.value == "lean")
    memory = ModelOptions::MemoryUse::lean;
  else
    return given.must_be("auto, fast or lean");
  return "";
}

/// All keywords, in the order in which messages name them.
static constexpr struct {
  std::string_view name;
  std::string (*parse)(const Given &);
} keywords[] = {{"device", parse_device},
                {"extensions", parse_extensions},
                {"check_consistency", parse_flag<&ModelOptions::check_consistency>},
                {"fallback", parse_flag<&ModelOptions::fallback>},
                {"layers", parse_layers},
                {"scale", parse_scale},
                {"variant", parse_variant},
                {"variant/energy", parse_variant},
                {"variant/energy_uncertainty", parse_variant},
                {"variant/non_conservative_force", parse_variant},
                {"variant/non_conservative_forces", parse_variant},
                {"variant/non_conservative_stress", parse_variant},
                {"non_conservative", parse_non_conservative},
                {"uncertainty_threshold", parse_uncertainty_threshold},
                {"memory", parse_memory},
                {"profile", parse_flag<&ModelOptions::profile>}};

/// "device, extensions, ... and profile"
static std::string keyword_list() {
  std::string text(keywords[0].name);
  for (size_t i = 1; i < std::size(keywords); i++) {
    text += i + 1 == std::size(keywords) ? " and " : ", ";
    text += keywords[i].name;
  }
  return text;
}

/// Keywords that would have no effect are mistakes.
static std::string contradiction(const ModelOptions &options, bool layers) {
  const auto no_effect = [](const std::string &keyword, const std::string &reason) {
    return "keyword '" + keyword + "' has no effect " + reason;
  };
  if (options.mode == "fp32" && layers)
    return no_effect("layers", "in mode fp32: all layers are FP32");
  if (!options.uncertainty && options.variants.count("energy_uncertainty"))
    return no_effect("variant/energy_uncertainty", "with uncertainty_threshold off");
  if (!options.direct_forces && options.variants.count("non_conservative_force"))
    return no_effect("variant/non_conservative_force", "without non_conservative on or forces");
  if (!options.direct_stress && options.variants.count("non_conservative_stress"))
    return no_effect("variant/non_conservative_stress", "without non_conservative on or stress");
  return "";
}

std::string parse_settings(int narg, char **arg, LAMMPS *lmp, Settings &settings) {
  auto &mode = settings.options.mode;
  mode = arg[0];
  if (const auto problem = problem_of([&] { check_mode(mode); }); !problem.empty())
    return problem;

  std::set<std::string> names;
  for (int i = 1; i < narg; i += 2) {
    const std::string name = arg[i];
    const auto keyword = std::find_if(std::begin(keywords), std::end(keywords),
                                      [&](const auto &known) { return known.name == name; });
    if (keyword == std::end(keywords))
      return "unknown keyword '" + name + "', the keywords are " + keyword_list();
    if (i + 1 >= narg)
      return "keyword '" + name + "' has no value";
    if (!names.insert(name).second)
      return "keyword '" + name + "' is given twice; give each of " + keyword_list() +
             " at most once";
    const std::string value = arg[i + 1];
    if (const auto problem = keyword->parse({name, value, settings, lmp}); !problem.empty())
      return problem;
  }
  return contradiction(settings.options, names.count("layers") > 0);
}

} // namespace metatomic_tc::lammps
