// SPDX-License-Identifier: GPL-2.0-or-later

#include "pair_metatomic_tc.h"

#include "atom.h"
#include "comm.h"
#include "compute.h"
#include "domain.h"
#include "elements.h"
#include "error.h"
#include "force.h"
#include "keywords.h"
#include "memory.h"
#include "messages.h"
#include "modify.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "platform.h"
#include "timer.h"
#include "update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>

using namespace LAMMPS_NS;
namespace mtc = metatomic_tc::lammps;

// Errors that depend only on the input script are the same on all ranks: error->all. Those of the
// model, its file or the device may happen on one rank only, where error->all would wait for the
// others forever: error->one.

static const std::string prefix = "pair_style metatomic-tc: ";

template <typename... Args>
void PairMetatomicTC::refuse(const std::string &text, const Args &...args) const {
  if constexpr (sizeof...(args) == 0)
    error->all(FLERR, prefix + text); // as it is, whatever braces are in it
  else
    error->all(FLERR, prefix + text, args...);
}

template <typename... Args>
void PairMetatomicTC::warn(const std::string &text, const Args &...args) const {
  if constexpr (sizeof...(args) == 0)
    error->warning(FLERR, prefix + text);
  else
    error->warning(FLERR, prefix + text, args...);
}

/// The atomic number that `text` names, by number or by symbol; 0 if it is neither.
static int parse_element(const std::string &text) {
  if (!text.empty() && text.size() < 4 && text.find_first_not_of("0123456789") == std::string::npos)
    return std::stoi(text);
  const auto found = std::find(mtc::symbols.begin() + 1, mtc::symbols.end(), text);
  return found == mtc::symbols.end() ? 0 : static_cast<int>(found - mtc::symbols.begin());
}

/// "8 (O)"
static std::string describe_element(int atomic_number) {
  std::string text = std::to_string(atomic_number);
  if (atomic_number < static_cast<int>(mtc::symbols.size()))
    text += " (" + std::string(mtc::symbols[atomic_number]) + ")";
  return text;
}

PairMetatomicTC::PairMetatomicTC(LAMMPS *lmp) : Pair(lmp) {
  single_enable = 0;
  restartinfo = 0;
  one_coeff = 1;
  manybody_flag = 1;
  no_virial_fdotr_compute = 1;
  centroidstressflag = CENTROID_AVAIL;
  ghostneigh = 1;
  reinitflag = 1;
  // compute pair: number of atoms above uncertainty_threshold
  nextra = 1;
  pvector = new double[nextra]();
}

PairMetatomicTC::~PairMetatomicTC() {
  delete[] pvector;
  memory->destroy(uncertainty_);
  if (allocated) {
    memory->destroy(setflag);
    memory->destroy(cutsq);
    memory->destroy(cutghost);
  }
}

void PairMetatomicTC::allocate() {
  if (!allocated) {
    const int size = atom->ntypes + 1;
    memory->create(setflag, size, size, "pair:setflag");
    memory->create(cutsq, size, size, "pair:cutsq");
    memory->create(cutghost, size, size, "pair:cutghost");
    allocated = 1;
  }
  for (int i = 0; i <= atom->ntypes; i++)
    for (int j = 0; j <= atom->ntypes; j++) {
      setflag[i][j] = 0;
      cutsq[i][j] = cutghost[i][j] = 0.0;
    }
}

// ---- commands -----------------------------------------------------------------------------------

/// Units of LAMMPS as metatomic writes them, and the unit of mass in g/mol.
struct UnitStyle {
  const char *name, *length, *energy;
  double mass;
};
static constexpr UnitStyle unit_styles[] = {{"metal", "angstrom", "eV", 1.0},
                                            {"real", "angstrom", "kcal/mol", 1.0},
                                            {"si", "meter", "joule", 6.02214076e26},
                                            {"electron", "bohr", "hartree", 1.0}};

/// Until pair_coeff is given again, there is none.
void PairMetatomicTC::forget_model() {
  model_.reset();
  structure_.on_device.reset();
  image_structure_.on_device.reset();
}

void PairMetatomicTC::settings(int narg, char **arg) {
  if (narg < 1)
    error->all(FLERR, "pair_style metatomic-tc needs a mode: pair_style metatomic-tc MODE "
                      "[keyword value ...], e.g. pair_style metatomic-tc tf32x3");

  mtc::Settings settings;
  if (const auto problem = mtc::parse_settings(narg, arg, lmp, settings); !problem.empty())
    refuse(problem);

  // Not what was loaded with other settings: pair_coeff has to be given again.
  options_ = settings.options;
  scale_ = settings.scale;
  forget_model();
  atomic_number_.clear();
  if (allocated)
    allocate();
}

void PairMetatomicTC::coeff(int narg, char **arg) {
  const int ntypes = atom->ntypes;
  allocate();
  forget_model();

  if (narg < 3 || strcmp(arg[0], "*") != 0 || strcmp(arg[1], "*") != 0)
    refuse("expected pair_coeff * * MODEL.pt ELEMENT ... with "
           "one element for each of the {} atom types",
           ntypes);
  if (narg - 3 != ntypes)
    refuse("expected one element for each of the {} atom types "
           "after the model file in pair_coeff, found {}",
           ntypes, narg - 3);

  const auto units =
      std::find_if(std::begin(unit_styles), std::end(unit_styles), [&](const UnitStyle &style) {
        return strcmp(style.name, update->unit_style) == 0;
      });
  if (units == std::end(unit_styles))
    error->all(FLERR, "pair_style metatomic-tc needs units metal, real, si or electron, not {}",
               update->unit_style);
  options_.length_unit = units->length;
  options_.energy_unit = units->energy;
  mass_unit_ = units->mass;

  atomic_number_.assign(ntypes + 1, -1);
  for (int i = 1; i <= ntypes; i++) {
    const std::string element = arg[2 + i];
    if (element == "NULL")
      continue;
    atomic_number_[i] = parse_element(element);
    if (atomic_number_[i] <= 0)
      refuse("'{}' in pair_coeff, for atom type {}, is not an "
             "element: expected a symbol like O, an atomic number or NULL",
             element, i);
  }
  if (std::count(atomic_number_.begin(), atomic_number_.end(), -1) == ntypes + 1)
    refuse("all atom types are NULL in pair_coeff");

  // Like other potentials, models are also found in the directories of LAMMPS_POTENTIALS.
  std::string path = utils::get_potential_file_path(arg[2]);
  if (path.empty())
    path = arg[2];

  std::string problem;
  try {
    model_ = std::make_unique<mtc::Model>(path, options_, mtc::local_rank(comm->me, comm->nprocs));
  } catch (const std::exception &failure) {
    problem = mtc::one_line(failure);
  }
  if (!problem.empty())
    stop(problem);

  for (int i = 1; i <= ntypes; i++)
    if (atomic_number_[i] > 0 && !model_->has_type(atomic_number_[i])) {
      const std::string found = describe_element(atomic_number_[i]);
      refuse("the model {} does not know element {} of atom type "
             "{}; it knows the atomic numbers {}",
             path, found, i, model_->types());
    }

  masses_checked_ = false;
  reported_ = false;

  // Under a hybrid style a pair of types belongs to this style only if it knows both; alone, it is
  // responsible for all.
  const bool hybrid = utils::strmatch(force->pair_style, "^hybrid");
  for (int i = 1; i <= ntypes; i++)
    for (int j = 1; j <= ntypes; j++)
      setflag[i][j] = !hybrid || (atomic_number_[i] > 0 && atomic_number_[j] > 0);

  if (comm->me == 0) {
    utils::logmesg(lmp, model_->summary() + ", LAMMPS " + lmp->version + "\n");
    for (const auto &warning : model_->warnings())
      warn(warning);
  }
}

// ---- setup --------------------------------------------------------------------------------------

void PairMetatomicTC::check_neighbor_settings() {
  // Not neighbor->exclude: it is undefined before the first run.
  if (neighbor->nex_type || neighbor->nex_group || neighbor->nex_mol || neighbor->includegroup)
    error->all(FLERR,
               "pair_style metatomic-tc does not work with neigh_modify exclude or include: "
               "models need all pairs of atoms (for atoms the model must not see, use NULL in "
               "pair_coeff)");
  if (atom->molecular != Atom::ATOMIC && atom->nbonds > 0)
    for (int i = 1; i < 4; i++)
      if (force->special_lj[i] == 0.0 && force->special_coul[i] == 0.0)
        error->all(FLERR,
                   "pair_style metatomic-tc needs all pairs of atoms, but special_bonds drops "
                   "bonded ones: use special_bonds lj/coul 1 1 1");
  // There is no list yet when the style is initialized.
  for (int i = 1; list && list->ijskip && i <= atom->ntypes; i++)
    for (int j = i; j <= atom->ntypes; j++)
      if (atomic_number_[i] > 0 && atomic_number_[j] > 0 && list->ijskip[i][j])
        refuse("the model knows the atom types {} and {}, but their "
               "pairs belong to another style of pair_style hybrid; a model needs all pairs of "
               "its atoms: use pair_style hybrid/overlay, or NULL for one of them",
               i, j);
}

void PairMetatomicTC::init_style() {
  if (!model_)
    refuse("no model, pair_coeff has to follow pair_style");
  if (!force->newton_pair)
    error->all(FLERR, "pair_style metatomic-tc needs newton on: forces on ghost atoms go back to "
                      "their owners");
  if (!atom->tag_enable)
    error->all(FLERR, "pair_style metatomic-tc needs atom IDs: atom_modify id yes");
  if (domain->dimension != 3)
    error->all(FLERR, "pair_style metatomic-tc needs dimension 3, not {}", domain->dimension);
  if (neighbor->skin > 10.0 * model_->cutoff())
    refuse("the neighbor skin is {}, but the cutoff of the model only "
           "{}; give a smaller one, e.g. neighbor {} bin",
           neighbor->skin, model_->cutoff(), 0.1 * model_->cutoff());
  // Lists of an earlier run are gone.
  list = nullptr;
  check_neighbor_settings();
  check_masses();
  if (options_.direct_stress && !(domain->xperiodic && domain->yperiodic && domain->zperiodic))
    refuse("the non-conservative stress needs a box that is "
           "periodic in all three directions");

  // Per-atom virials need every periodic image as an atom of its own, as far as the model reaches.
  atomic_virials_ = false;
  for (const auto *compute : modify->get_compute_list())
    atomic_virials_ = atomic_virials_ || compute->pressatomflag;

  // The model makes its pairs itself, where it computes. LAMMPS's list only tells which types of
  // atoms a hybrid style left to this one, and is built only to compare with.
  int flags = NeighConst::REQ_FULL;
  if (!options_.check_consistency)
    flags |= NeighConst::REQ_OCCASIONAL;
  if (comm->nprocs > 1 || atomic_virials_) {
    // The neighbors of ghosts are needed, too, and ghosts out to the interaction range; and one
    // cutoff farther, because there the neighbors of an atom must be complete: PET's adaptive
    // cutoff makes even the length of an edge depend on the neighbors of both its atoms, which the
    // interaction range does not count. Models do not say whether they do so, hence it is always
    // added. (One rank needs no more than the neighbor list: its ghosts are images of its atoms.)
    if (options_.check_consistency)
      flags |= NeighConst::REQ_GHOST;
    const double range = model_->interaction_range();
    if (!std::isfinite(range) || range < 0.0)
      refuse("the model {}, it can only run on one MPI rank, and "
             "without computes of a per-atom virial such as stress/atom",
             range < 0.0 ? "does not say its interaction range"
                         : "has an infinite interaction range");
    if (comm->mode != Comm::SINGLE)
      error->all(FLERR,
                 "pair_style metatomic-tc needs comm_modify mode single on several MPI ranks");
    comm->cutghostuser = std::max(comm->cutghostuser, range + model_->cutoff() + neighbor->skin);
  }
  neighbor->add_request(this, flags);
  last_build_ = -1;
  if (options_.profile) {
    times_ = RunTimes();
    model_->reset_times();
  }
}

void PairMetatomicTC::check_masses() {
  // A wrong order of the elements in pair_coeff runs, and gives nonsense. Hydrogen may be deuterium
  // or tritium, or have got mass from its neighbor.
  if (masses_checked_ || !atom->mass || comm->me != 0)
    return;
  masses_checked_ = true;
  for (int i = 1; i <= atom->ntypes; i++) {
    const int element = atomic_number_[i];
    if (element <= 0 || element >= static_cast<int>(mtc::masses.size()) || !atom->mass_setflag[i])
      continue;
    const double mass = atom->mass[i] * mass_unit_, expected = mtc::masses[element];
    if (std::abs(mass - expected) <= 0.15 * expected || (element == 1 && mass < 4.2))
      continue;
    warn("atom type {} is {} in pair_coeff, but has mass {} "
         "instead of {}: are the elements in the order of the types?",
         i, mtc::symbols[element], mass, expected);
  }
}

void *PairMetatomicTC::extract(const char *name, int &dim) {
  dim = 0;
  if (strcmp(name, "scale") == 0)
    return &scale_;
  return nullptr;
}

void *PairMetatomicTC::extract_peratom(const char *name, int &columns) {
  columns = 0;
  if (strcmp(name, "uncertainty") == 0 && model_ && model_->uncertainty_threshold() > 0.0) {
    grow_uncertainty();
    return uncertainty_;
  }
  return nullptr;
}

/// Room for all atoms of this rank.
void PairMetatomicTC::grow_uncertainty() {
  if (uncertainty_size_ >= atom->nmax)
    return;
  uncertainty_size_ = atom->nmax;
  memory->destroy(uncertainty_);
  memory->create(uncertainty_, uncertainty_size_, "pair:uncertainty");
  std::fill_n(uncertainty_, uncertainty_size_, 0.0);
}

double PairMetatomicTC::init_one(int i, int j) {
  const bool seen = atomic_number_[i] > 0 && atomic_number_[j] > 0;
  return cutghost[i][j] = cutghost[j][i] = seen ? model_->cutoff() : 0.0;
}

// ---- compute ------------------------------------------------------------------------------------

mtc::Cell PairMetatomicTC::cell() const {
  mtc::Cell cell = {{{domain->xprd, 0.0, 0.0}, {0.0, domain->yprd, 0.0}, {0.0, 0.0, domain->zprd}},
                    {domain->xperiodic != 0, domain->yperiodic != 0, domain->zperiodic != 0}};
  if (domain->triclinic) {
    cell.rows[1][0] = domain->xy;
    cell.rows[2][0] = domain->xz;
    cell.rows[2][1] = domain->yz;
  }
  for (int k = 0; k < 3; k++)
    if (!cell.periodic[k])
      for (int m = 0; m < 3; m++)
        cell.rows[k][m] = 0.0;
  return cell;
}

/// How far `x` is from the slabs between the faces of the subdomain, the largest of the three: the
/// distance by which LAMMPS selects ghosts.
double PairMetatomicTC::distance_outside(const double *x) const {
  double position[3] = {x[0], x[1], x[2]};
  const double *lo = domain->sublo, *hi = domain->subhi;
  double scale[3] = {1.0, 1.0, 1.0};
  if (domain->triclinic) {
    domain->x2lamda(position, position);
    lo = domain->sublo_lamda;
    hi = domain->subhi_lamda;
    const double *h_inv = domain->h_inv;
    scale[0] = 1.0 / std::sqrt(h_inv[0] * h_inv[0] + h_inv[5] * h_inv[5] + h_inv[4] * h_inv[4]);
    scale[1] = 1.0 / std::sqrt(h_inv[1] * h_inv[1] + h_inv[3] * h_inv[3]);
    scale[2] = 1.0 / h_inv[2];
  }
  double distance = 0.0;
  for (int k = 0; k < 3; k++)
    distance =
        std::max({distance, (lo[k] - position[k]) * scale[k], (position[k] - hi[k]) * scale[k]});
  return distance;
}

void PairMetatomicTC::build_structure(const mtc::EvaluatedAtoms &atoms, const mtc::Cell &cell,
                                      mtc::Structure &structure) {
  structure.types.resize(atoms.size());
  for (int i = 0; i < atoms.size(); i++)
    structure.types[i] = atomic_number_[atom->type[atoms.lammps_index(i)]];
  structure.owned = atoms.owned();
  structure.list_cutoff = model_->cutoff() + neighbor->skin;
  structure.build_cell = cell;
  atoms.positions(atom->x, cell, structure.build_positions);
  structure.build++;
}

void PairMetatomicTC::rebuild() {
  check_neighbor_settings();
  const int nall = atom->nlocal + atom->nghost;
  std::vector<int64_t> tag(atom->tag, atom->tag + nall);
  std::vector<char> skip(nall);
  std::vector<double> outside(nall, 0.0);
  for (int k = 0; k < nall; k++) {
    skip[k] = atomic_number_[atom->type[k]] <= 0;
    if (k >= atom->nlocal)
      outside[k] = distance_outside(atom->x[k]);
  }
  double center[3];
  if (domain->triclinic) {
    double middle[3] = {0.5, 0.5, 0.5};
    domain->lamda2x(middle, center);
  } else {
    for (int k = 0; k < 3; k++)
      center[k] = 0.5 * (domain->boxlo[k] + domain->boxhi[k]);
  }
  // On one rank all ghosts are images of owned atoms, which the model's own list knows.
  const bool ghosts = comm->nprocs > 1 || options_.check_consistency;
  atoms_.build(atom->nlocal, ghosts ? atom->nghost : 0, tag, skip, atom->x, outside, center,
               cell());
  build_structure(atoms_, cell(), structure_);
  if (atomic_virials_) {
    // Nothing is an image of anything else.
    std::iota(tag.begin(), tag.end(), 0);
    images_.build(atom->nlocal, atom->nghost, tag, skip, atom->x, outside, center, mtc::Cell());
    build_structure(images_, mtc::Cell(), image_structure_);
  }
  if (options_.check_consistency) {
    check_pairs(atoms_, structure_);
    if (atomic_virials_)
      check_pairs(images_, image_structure_);
  }
  last_build_ = neighbor->lastcall;
  // All ranks are here at the first step of a run.
  if (!reported_) {
    reported_ = true;
    report_atoms();
    check_memory();
  }
}

/// Callback of Comm::ring
static void append(int n, char *data, void *all) {
  const auto *numbers = reinterpret_cast<const double *>(data);
  auto &target = *static_cast<std::vector<double> *>(all);
  target.insert(target.end(), numbers, numbers + n);
}

/// The numbers of all ranks, in the order of ranks from this one on. Through LAMMPS: the plugin
/// makes no MPI call itself.
std::vector<double> PairMetatomicTC::gather(std::vector<double> own) const {
  std::vector<double> all;
  comm->ring(static_cast<int>(own.size()), sizeof(double), own.data(), 0, &append, nullptr, &all);
  return all;
}

/// A number of all ranks.
struct Spread {
  double low, average, high;
};

/// @param all of `gather`: `width` numbers of each rank, of which this is number `index`
static Spread spread(const std::vector<double> &all, size_t width, size_t index) {
  Spread result = {all[index], 0.0, all[index]};
  for (size_t m = index; m < all.size(); m += width) {
    result.low = std::min(result.low, all[m]);
    result.high = std::max(result.high, all[m]);
    result.average += all[m];
  }
  result.average /= static_cast<double>(all.size() / width);
  return result;
}

/// How the work is shared among ranks, in one line.
void PairMetatomicTC::report_atoms() {
  if (comm->nprocs == 1)
    return;
  const double owned = atoms_.owned(), ghosts = atoms_.owned() ? atoms_.size() - owned : 0.0;
  const auto all = gather({owned, ghosts, ghosts / std::max(1.0, owned + ghosts)});
  if (comm->me != 0)
    return;
  std::string text;
  for (int k = 0; k < 3; k++) {
    const auto [low, average, high] = spread(all, 3, k);
    if (k < 2)
      text += fmt::format("{} {:.0f}/{:.1f}/{:.0f}, ", k ? "ghosts" : "owned atoms", low, average,
                          high);
    else
      text += fmt::format("share of ghosts in its work {:.0f}/{:.0f}/{:.0f} %", 100.0 * low,
                          100.0 * average, 100.0 * high);
  }
  utils::logmesg(lmp, "metatomic-tc: each of {} ranks evaluates (min/avg/max) {}\n", comm->nprocs,
                 text);
  int many = 0;
  for (size_t m = 0; m < all.size(); m += 3)
    many += all[m + 1] > all[m];
  if (many > 0)
    warn("{} of {} ranks evaluate more ghosts than atoms of "
         "their own, work that other ranks do, too: fewer ranks may be as fast",
         many, comm->nprocs);
}

/// Says what memory a GPU needs, and stops here when it has not got it, instead of at the first
/// step.
void PairMetatomicTC::check_memory() {
  std::optional<mtc::Memory> memory;
  std::string problem;
  // A hash has more bits than a number of gather, whose 53 are enough to tell GPUs apart.
  const double gpu = static_cast<double>(std::hash<std::string>()(model_->gpu()) >> 11);
  const auto gpus = gather({gpu});
  const auto sharing = static_cast<double>(std::count(gpus.begin(), gpus.end(), gpu));
  double available = 1.0;
  const auto estimate = [&] {
    memory = model_->estimate_memory(structure_);
    available = memory ? memory->free / sharing + memory->cached : 1.0;
  };
  try {
    if (atoms_.owned() > 0) {
      estimate();
      if (memory && memory->per_atom * atoms_.size() > available && model_->use_less_memory())
        estimate();
    }
  } catch (const std::exception &failure) {
    problem = mtc::one_line(failure);
  }
  if (!problem.empty())
    fail(problem);
  constexpr double gib = 1024.0 * 1024.0 * 1024.0;
  const double needed = memory ? memory->per_atom * atoms_.size() : 0.0;
  if (needed > available)
    stop(fmt::format(
        "rank {} needs about {:.1f} GiB of GPU memory for {} atoms "
        "and {} ghosts ({:.0f} KiB for each), but {:.1f} GiB are available: use more ranks "
        "with a GPU each, a smaller model, or fewer atoms",
        comm->me, needed / gib, atoms_.owned(), atoms_.size() - atoms_.owned(),
        memory->per_atom / 1024.0, available / gib));
  const auto all =
      gather({needed, available, memory ? memory->per_atom : 0.0, model_->is_lean() ? 1.0 : 0.0});
  size_t most = 0;
  for (size_t m = 0; m < all.size(); m += 4)
    if (all[m] / all[m + 1] > all[most] / all[most + 1])
      most = m;
  if (comm->me == 0 && all[most] > 0.0)
    utils::logmesg(lmp,
                   "metatomic-tc: about {:.0f} KiB of GPU memory for each atom (memory {}), {:.1f} "
                   "of {:.1f} available GiB{}\n",
                   all[most + 2] / 1024.0, all[most + 3] > 0.0 ? "lean" : "fast", all[most] / gib,
                   all[most + 1] / gib,
                   comm->nprocs > 1 ? " on the rank with the least to spare" : "");
}

/// Stops all ranks for what is wrong on this one, whose message everybody gets.
void PairMetatomicTC::stop(const std::string &problem) {
  try {
    error->one(FLERR, prefix + problem);
  } catch (...) {
    // When a rank aborts, what the launcher has not read of its output yet is lost.
    if (comm->nprocs > 1)
      platform::usleep(500000);
    throw;
  }
}

/// Stops all ranks when the model failed on this one.
void PairMetatomicTC::fail(const std::string &problem) {
  std::string memory;
  try {
    memory = model_->memory_use();
  } catch (const std::exception &) {
    // After some errors a GPU does not answer anymore.
  }
  stop(fmt::format("the model failed on rank {} at step {}, with {} atoms and {} "
                   "ghosts{}: {}",
                   comm->me, update->ntimestep, atoms_.owned(), atoms_.size() - atoms_.owned(),
                   memory.empty() ? "" : " (" + memory + ")", problem));
}

/// Compares the pairs for the model with LAMMPS's.
void PairMetatomicTC::check_pairs(const mtc::EvaluatedAtoms &atoms,
                                  const mtc::Structure &structure) {
  if (atoms.owned() == 0)
    return;
  std::string problem;
  try {
    problem =
        mtc::compare(model_->pairs(structure),
                     mtc::pairs_of(atoms, {list->inum + (list->ghost ? list->gnum : 0), list->ilist,
                                           list->numneigh, list->firstneigh, NEIGHMASK}),
                     atoms, structure.build_positions, structure.build_cell, structure.list_cutoff);
  } catch (const std::exception &failure) {
    problem = mtc::one_line(failure);
  }
  if (!problem.empty())
    stop(fmt::format("at step {} on rank {} {}; this is an error in "
                     "metatomic-tc, please report it",
                     update->ntimestep, comm->me, problem));
}

void PairMetatomicTC::compute(int eflag, int vflag) {
  ev_init(eflag, vflag);
  // On steps of a run, not in its setup: those LAMMPS times, too.
  const bool timed = options_.profile && !update->setupflag;
  const double start = platform::walltime();
  if (options_.profile && !timed)
    model_->reset_times();
  pvector[0] = 0.0;
  if (eflag_atom && !model_->has_atomic_energies())
    refuse("the model has no per-atom energies, which a compute "
           "like pe/atom asks for");
  if (vflag_atom || cvflag_atom) {
    if (options_.direct_stress)
      refuse("there is no per-atom virial, which a compute "
             "like stress/atom or heat/flux asks for, of a non-conservative stress");
    if (!model_->has_atomic_energies())
      refuse("the model has no per-atom energies, which a per-atom "
             "virial needs, which a compute like stress/atom or heat/flux asks for");
    if (!atomic_virials_)
      refuse("a compute asks for a per-atom virial, but did "
             "not when the run began");
  }

  // The age alone does not tell that a list is new when compute was not called at its first step.
  if (neighbor->ago == 0 || last_build_ != neighbor->lastcall)
    rebuild();
  times_.pairs += platform::walltime() - start;

  // A rank without atoms has nothing to add. LAMMPS goes on with its communication; there is none
  // in this style.
  if (atoms_.owned() > 0)
    evaluate();

  if (timed) {
    times_.steps++;
    times_.pair += platform::walltime() - start;
  } else if (options_.profile) {
    times_ = RunTimes();
    model_->reset_times();
  }
}

void PairMetatomicTC::evaluate() {
  double start = platform::walltime();
  structure_.cell = cell();
  atoms_.positions(atom->x, structure_.cell, structure_.positions);
  const bool images = vflag_atom || cvflag_atom;
  if (images)
    images_.positions(atom->x, image_structure_.cell, image_structure_.positions);
  times_.pairs += platform::walltime() - start;

  mtc::Prediction prediction;
  std::vector<double> virials;
  std::string problem;
  try {
    prediction = model_->evaluate(structure_, vflag_global != 0);
    if (images)
      virials = model_->atomic_virials(image_structure_);
  } catch (const std::exception &failure) {
    problem = mtc::one_line(failure);
  }
  if (!problem.empty())
    fail(problem);
  if (const auto failure = model_->graph_failure(); !failure.empty() && !graph_failed_) {
    graph_failed_ = true;
    warn("on rank {} steps are no CUDA graphs, so small systems "
         "are slower: {}",
         comm->me, failure);
  }

  bool finite = std::isfinite(prediction.energy);
  // Without positions there are no pairs, and the energy is that of single atoms.
  for (const auto *numbers : {&structure_.positions, &prediction.forces, &virials})
    for (const double number : *numbers)
      finite = finite && std::isfinite(number);
  for (const double component : prediction.virial)
    finite = finite && std::isfinite(component);
  if (!finite)
    stop(fmt::format("positions, energy or forces are NaN or infinite on "
                     "rank {} at step {}: atoms are too close, or far from what the model was "
                     "trained on",
                     comm->me, update->ntimestep));

  // Forces on ghosts are sent to their owners by LAMMPS.
  double **f = atom->f;
  for (int i = 0; i < atoms_.size(); i++)
    for (int m = 0; m < 3; m++)
      f[atoms_.lammps_index(i)][m] += scale_ * prediction.forces[3 * i + m];
  if (eflag_global)
    eng_vdwl += scale_ * prediction.energy;
  if (eflag_atom)
    for (int i = 0; i < atoms_.owned(); i++)
      eatom[atoms_.lammps_index(i)] += scale_ * prediction.energies[i];
  if (vflag_global)
    for (int m = 0; m < 6; m++)
      virial[m] += scale_ * prediction.virial[m];
  if (images)
    for (int i = 0; i < images_.size(); i++) {
      const int k = images_.lammps_index(i);
      const double *w = &virials[9 * i];
      if (cvflag_atom)
        for (int m = 0; m < 9; m++)
          cvatom[k][m] += scale_ * w[m];
      if (vflag_atom)
        for (int m = 0; m < 6; m++)
          vatom[k][m] += scale_ * (m < 3 ? w[m] : 0.5 * (w[m] + w[m + 3]));
    }
  check_uncertainty(prediction.uncertainties);
}

void PairMetatomicTC::check_uncertainty(const std::vector<double> &uncertainties) {
  if (uncertainties.empty())
    return;
  grow_uncertainty();
  const double threshold = model_->uncertainty_threshold();
  std::vector<tagint> above;
  for (int i = 0; i < atoms_.owned(); i++) {
    const int k = atoms_.lammps_index(i);
    uncertainty_[k] = uncertainties[i];
    if (uncertainties[i] > threshold)
      above.push_back(atom->tag[k]);
  }
  pvector[0] = above.size();
  if (above.empty())
    return;
  std::sort(above.begin(), above.end());
  std::string names;
  for (size_t i = 0; i < above.size() && i < 10; i++)
    names += fmt::format(" {}", above[i]);
  warn("at step {} the uncertainty of the energy of {} atoms is "
       "above {:.4g}, up to {:.4g}; atom IDs:{}{}",
       update->ntimestep, above.size(), threshold,
       *std::max_element(uncertainties.begin(), uncertainties.end()), names,
       above.size() > 10 ? " ..." : "");
}

// ---- profile ------------------------------------------------------------------------------------

// LAMMPS calls it at the end of a run.
void PairMetatomicTC::finish() {
  if (!options_.profile || !model_ || times_.steps == 0)
    return;
  const auto &model = model_->times();
  const double total = timer->get_wall(Timer::TOTAL);
  const double lists = timer->get_wall(Timer::NEIGH), comm_time = timer->get_wall(Timer::COMM);
  const double pairs = times_.pairs + model.pairs;
  const double known =
      pairs + model.input + model.forward + model.backward + model.step + model.output;
  const std::vector<std::pair<const char *, double>> sections = {
      {"LAMMPS neighbor lists", lists},
      {"pairs for the model", pairs},
      {"input", model.input},
      {"forward", model.forward},
      {"backward", model.backward},
      {"forward and backward", model.step},
      {"output", model.output},
      {"rest of the pair style", times_.pair - known},
      {"communication", comm_time},
      {"rest of the run", total - lists - comm_time - times_.pair}};

  std::vector<double> own;
  for (const auto &section : sections)
    own.push_back(section.second);
  own.push_back(static_cast<double>(model.repeated_atoms));
  own.push_back(static_cast<double>(model.repeated_bytes));
  const std::vector<double> all = gather(own);
  if (comm->me != 0)
    return;

  std::string text = fmt::format("metatomic-tc: profile of {} steps on {} ranks, in s\n"
                                 "{:<24}|{:>11} |{:>11} |{:>11} |%total\n",
                                 times_.steps, comm->nprocs, "Section", "min", "avg", "max");
  // The sections of a rank add up to its whole run, whose length differs a little between ranks.
  double whole = 0.0;
  for (size_t m = 0; m < all.size(); m += own.size())
    whole += std::accumulate(&all[m], &all[m] + sections.size(), 0.0) / comm->nprocs;
  for (size_t k = 0; k < sections.size(); k++) {
    const auto [low, average, high] = spread(all, own.size(), k);
    text += fmt::format("{:<24}|{:>11.5g} |{:>11.5g} |{:>11.5g} |{:>6.2f}\n", sections[k].first,
                        low, average, high, whole > 0.0 ? 100.0 * average / whole : 0.0);
  }
  double atoms = 0.0, bytes = 0.0;
  for (size_t m = sections.size(); m < all.size(); m += own.size()) {
    atoms += all[m];
    bytes += all[m + 1];
  }
  if (atoms > 0.0)
    text += fmt::format("Between rebuilds {:.4g} bytes for each atom and step go to the device\n",
                        bytes / atoms);
  if (const auto memory = model_->memory_use(); !memory.empty())
    text += memory + (comm->nprocs > 1 ? " of rank 0\n" : "\n");
  utils::logmesg(lmp, text);
}
