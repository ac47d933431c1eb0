// SPDX-License-Identifier: GPL-2.0-or-later

#include "pair_metatomic_tc.h"

#include "atom.h"
#include "comm.h"
#include "domain.h"
#include "error.h"
#include "force.h"
#include "memory.h"
#include "neigh_list.h"
#include "neighbor.h"
#include "update.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string_view>

using namespace LAMMPS_NS;
namespace mtc = metatomic_tc::lammps;

// Errors that depend only on the input script are the same on all ranks: error->all. Those of the
// model, its file or the device may happen on one rank only, where error->all would wait for the
// others forever: error->one.

// clang-format off
static constexpr std::array<std::string_view, 119> symbols = {"",
  "H", "He", "Li", "Be", "B", "C", "N", "O", "F", "Ne", "Na", "Mg", "Al", "Si", "P", "S", "Cl", "Ar",
  "K", "Ca", "Sc", "Ti", "V", "Cr", "Mn", "Fe", "Co", "Ni", "Cu", "Zn", "Ga", "Ge", "As", "Se", "Br",
  "Kr", "Rb", "Sr", "Y", "Zr", "Nb", "Mo", "Tc", "Ru", "Rh", "Pd", "Ag", "Cd", "In", "Sn", "Sb", "Te",
  "I", "Xe", "Cs", "Ba", "La", "Ce", "Pr", "Nd", "Pm", "Sm", "Eu", "Gd", "Tb", "Dy", "Ho", "Er", "Tm",
  "Yb", "Lu", "Hf", "Ta", "W", "Re", "Os", "Ir", "Pt", "Au", "Hg", "Tl", "Pb", "Bi", "Po", "At", "Rn",
  "Fr", "Ra", "Ac", "Th", "Pa", "U", "Np", "Pu", "Am", "Cm", "Bk", "Cf", "Es", "Fm", "Md", "No", "Lr",
  "Rf", "Db", "Sg", "Bh", "Hs", "Mt", "Ds", "Rg", "Cn", "Nh", "Fl", "Mc", "Lv", "Ts", "Og"};
// clang-format on

/// The atomic number that `text` names, by number or by symbol; 0 if it is neither.
static int parse_element(const std::string &text) {
  if (!text.empty() && text.size() < 4 && text.find_first_not_of("0123456789") == std::string::npos)
    return std::stoi(text);
  const auto found = std::find(symbols.begin() + 1, symbols.end(), text);
  return found == symbols.end() ? 0 : static_cast<int>(found - symbols.begin());
}

/// "8 (O)"
static std::string describe_element(int atomic_number) {
  std::string text = std::to_string(atomic_number);
  if (atomic_number < static_cast<int>(symbols.size()))
    text += " (" + std::string(symbols[atomic_number]) + ")";
  return text;
}

PairMetatomicTC::PairMetatomicTC(LAMMPS *lmp) : Pair(lmp) {
  single_enable = 0;
  restartinfo = 0;
  one_coeff = 1;
  manybody_flag = 1;
  no_virial_fdotr_compute = 1;
  centroidstressflag = CENTROID_NOTAVAIL;
  ghostneigh = 1;
}

PairMetatomicTC::~PairMetatomicTC() {
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

// ---- commands
// ------------------------------------------------------------------------------------

void PairMetatomicTC::settings(int narg, char **arg) {
  if (narg < 1)
    error->all(FLERR, "pair_style metatomic-tc needs a mode: pair_style metatomic-tc MODE "
                      "[keyword value ...], e.g. pair_style metatomic-tc tf32x3");

  mtc::ModelOptions options;
  options.mode = arg[0];
  std::string problem;
  try {
    mtc::check_mode(options.mode);
  } catch (const std::exception &invalid) {
    problem = mtc::one_line(invalid);
  }
  if (!problem.empty())
    error->all(FLERR, "pair_style metatomic-tc: " + problem);

  std::vector<std::string> seen;
  for (int i = 1; i < narg; i += 2) {
    const std::string keyword = arg[i];
    const bool known = keyword == "device" || keyword == "extensions" ||
                       keyword == "check_consistency" || keyword == "fallback";
    if (!known)
      error->all(FLERR,
                 "pair_style metatomic-tc: unknown keyword '" + keyword +
                     "', the keywords are device, extensions, check_consistency and fallback");
    if (i + 1 >= narg)
      error->all(FLERR, "pair_style metatomic-tc: keyword '" + keyword + "' has no value");
    if (std::find(seen.begin(), seen.end(), keyword) != seen.end())
      error->all(FLERR, "pair_style metatomic-tc: keyword '" + keyword +
                            "' is given twice; give each of device, extensions, check_consistency "
                            "and fallback at most once");
    seen.push_back(keyword);

    const std::string value = arg[i + 1];
    if (keyword == "device") {
      const bool numbered = value.size() > 5 && value.size() < 9 &&
                            value.compare(0, 5, "cuda:") == 0 &&
                            value.find_first_not_of("0123456789", 5) == std::string::npos;
      if (value != "cpu" && value != "cuda" && !numbered)
        error->all(FLERR, "pair_style metatomic-tc: device must be cpu, cuda or cuda:N, not '" +
                              value + "'");
      options.device = value;
    } else if (keyword == "extensions") {
      if (!platform::path_is_directory(value))
        error->all(FLERR, "pair_style metatomic-tc: extensions '" + value + "' is not a directory");
      options.extensions = value;
    } else {
      const bool yes = value == "yes" || value == "on" || value == "true";
      if (!yes && value != "no" && value != "off" && value != "false")
        error->all(FLERR, "pair_style metatomic-tc: " + keyword + " must be yes or no, not '" +
                              value + "'");
      (keyword == "fallback" ? options.fallback : options.check_consistency) = yes;
    }
  }

  // Not what was loaded with other settings: pair_coeff has to be given again.
  options_ = options;
  model_.reset();
  atomic_number_.clear();
  if (allocated)
    allocate();
}

void PairMetatomicTC::coeff(int narg, char **arg) {
  const int ntypes = atom->ntypes;
  allocate();
  model_.reset();

  if (narg < 3 || strcmp(arg[0], "*") != 0 || strcmp(arg[1], "*") != 0)
    error->all(FLERR,
               "pair_style metatomic-tc: expected pair_coeff * * MODEL.pt ELEMENT ... with "
               "one element for each of the {} atom types",
               ntypes);
  if (narg - 3 != ntypes)
    error->all(FLERR,
               "pair_style metatomic-tc: expected one element for each of the {} atom types "
               "after the model file in pair_coeff, found {}",
               ntypes, narg - 3);

  const bool metal = strcmp(update->unit_style, "metal") == 0;
  if (!metal && strcmp(update->unit_style, "real") != 0)
    error->all(FLERR, "pair_style metatomic-tc needs units metal or real, not {}",
               update->unit_style);
  options_.length_unit = "angstrom";
  options_.energy_unit = metal ? "eV" : "kcal/mol";

  atomic_number_.assign(ntypes + 1, -1);
  for (int i = 1; i <= ntypes; i++) {
    const std::string element = arg[2 + i];
    if (element == "NULL")
      continue;
    atomic_number_[i] = parse_element(element);
    if (atomic_number_[i] <= 0)
      error->all(FLERR,
                 "pair_style metatomic-tc: '{}' in pair_coeff, for atom type {}, is not an "
                 "element: expected a symbol like O, an atomic number or NULL",
                 element, i);
  }
  if (std::count(atomic_number_.begin(), atomic_number_.end(), -1) == ntypes + 1)
    error->all(FLERR, "pair_style metatomic-tc: all atom types are NULL in pair_coeff");

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
    error->one(FLERR, "pair_style metatomic-tc: " + problem);

  for (int i = 1; i <= ntypes; i++)
    if (atomic_number_[i] > 0 && !model_->has_type(atomic_number_[i])) {
      const std::string found = describe_element(atomic_number_[i]);
      error->all(FLERR,
                 "pair_style metatomic-tc: the model {} does not know element {} of atom type "
                 "{}; it knows the atomic numbers {}",
                 path, found, i, model_->types());
    }

  // Under a hybrid style a pair of types belongs to this style only if it knows both; alone, it is
  // responsible for all.
  const bool hybrid = utils::strmatch(force->pair_style, "^hybrid");
  for (int i = 1; i <= ntypes; i++)
    for (int j = 1; j <= ntypes; j++)
      setflag[i][j] = !hybrid || (atomic_number_[i] > 0 && atomic_number_[j] > 0);

  if (comm->me == 0) {
    utils::logmesg(lmp, model_->summary() + ", LAMMPS " + lmp->version + "\n");
    for (const auto &warning : model_->warnings())
      error->warning(FLERR, "pair_style metatomic-tc: " + warning);
  }
}

// ---- setup
// ---------------------------------------------------------------------------------------

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
}

void PairMetatomicTC::init_style() {
  if (!model_)
    error->all(FLERR, "pair_style metatomic-tc: no model, pair_coeff has to follow pair_style");
  if (!force->newton_pair)
    error->all(FLERR, "pair_style metatomic-tc needs newton on: forces on ghost atoms go back to "
                      "their owners");
  if (!atom->tag_enable)
    error->all(FLERR, "pair_style metatomic-tc needs atom IDs: atom_modify id yes");
  if (domain->dimension != 3)
    error->all(FLERR, "pair_style metatomic-tc needs dimension 3, not {}", domain->dimension);
  check_neighbor_settings();

  int flags = NeighConst::REQ_FULL;
  if (comm->nprocs > 1) {
    // The neighbors of ghosts are needed, too, and ghosts out to the interaction range; and one
    // cutoff farther, because there the neighbors of an atom must be complete: PET's adaptive
    // cutoff makes even the length of an edge depend on the neighbors of both its atoms, which the
    // interaction range does not count. Models do not say whether they do so, hence it is always
    // added. (One rank needs no more than the neighbor list: its ghosts are images of its atoms.)
    flags |= NeighConst::REQ_GHOST;
    const double range = model_->interaction_range();
    if (!std::isfinite(range))
      error->all(FLERR,
                 "pair_style metatomic-tc: the model's interaction range is infinite, it can "
                 "only run on one MPI rank, not on {}",
                 comm->nprocs);
    if (range < 0.0)
      error->all(FLERR,
                 "pair_style metatomic-tc: the model does not say its interaction range, it "
                 "can only run on one MPI rank, not on {}",
                 comm->nprocs);
    if (comm->mode != Comm::SINGLE)
      error->all(FLERR,
                 "pair_style metatomic-tc needs comm_modify mode single on several MPI ranks");
    comm->cutghostuser = std::max(comm->cutghostuser, range + model_->cutoff() + neighbor->skin);
  }
  neighbor->add_request(this, flags);
  last_build_ = -1;
}

double PairMetatomicTC::init_one(int i, int j) {
  const bool seen = atomic_number_[i] > 0 && atomic_number_[j] > 0;
  return cutghost[i][j] = cutghost[j][i] = seen ? model_->cutoff() : 0.0;
}

// ---- compute
// -------------------------------------------------------------------------------------

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
  atoms_.build(atom->nlocal, atom->nghost, tag, skip, atom->x, outside, center, cell());
  structure_.pairs =
      mtc::find_pairs(atoms_, {list->inum + (list->ghost ? list->gnum : 0), list->ilist,
                               list->numneigh, list->firstneigh, NEIGHMASK});

  structure_.types.resize(atoms_.size());
  for (int i = 0; i < atoms_.size(); i++)
    structure_.types[i] = atomic_number_[atom->type[atoms_.lammps_index(i)]];
  structure_.owned = atoms_.owned();
  structure_.build++;
  last_build_ = neighbor->lastcall;
}

void PairMetatomicTC::compute(int eflag, int vflag) {
  ev_init(eflag, vflag);
  if (vflag_atom || cvflag_atom)
    error->all(FLERR, "pair_style metatomic-tc has no per-atom virial, which a compute like "
                      "stress/atom or heat/flux asks for");
  if (eflag_atom && !model_->has_atomic_energies())
    error->all(FLERR,
               "pair_style metatomic-tc: the model has no per-atom energies, which a compute "
               "like pe/atom asks for");

  // The age alone does not tell that a list is new when compute was not called at its first step.
  if (neighbor->ago == 0 || last_build_ != neighbor->lastcall)
    rebuild();

  // A rank without atoms has nothing to add. LAMMPS goes on with its communication; there is none
  // in this style.
  if (atoms_.owned() == 0)
    return;

  structure_.cell = cell();
  atoms_.positions(atom->x, structure_.cell, structure_.positions);

  mtc::Prediction prediction;
  std::string problem;
  try {
    prediction = model_->evaluate(structure_, vflag_global != 0);
  } catch (const std::exception &failure) {
    problem = mtc::one_line(failure);
  }
  if (!problem.empty())
    error->one(FLERR,
               "pair_style metatomic-tc: the model failed on rank {} at step {}, with {} atoms "
               "and {} ghosts: {}",
               comm->me, update->ntimestep, atoms_.owned(), atoms_.size() - atoms_.owned(),
               problem);

  bool finite = std::isfinite(prediction.energy);
  for (const double force_component : prediction.forces)
    finite = finite && std::isfinite(force_component);
  if (!finite)
    error->one(FLERR,
               "pair_style metatomic-tc: energy or forces of the model are NaN or infinite on "
               "rank {} at step {}: atoms are too close, or far from what the model was "
               "trained on",
               comm->me, update->ntimestep);

  // Forces on ghosts are sent to their owners by LAMMPS.
  double **f = atom->f;
  for (int i = 0; i < atoms_.size(); i++)
    for (int m = 0; m < 3; m++)
      f[atoms_.lammps_index(i)][m] += prediction.forces[3 * i + m];
  if (eflag_global)
    eng_vdwl += prediction.energy;
  if (eflag_atom)
    for (int i = 0; i < atoms_.owned(); i++)
      eatom[atoms_.lammps_index(i)] += prediction.energies[i];
  if (vflag_global)
    for (int m = 0; m < 6; m++)
      virial[m] += prediction.virial[m];
}
