#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <torch/script.h>

namespace metatomic_tc {

/// One MD step (energies, forces, virial) of one structure after the other by a PET model with the
/// backend of metatomic-tc. It goes around metatomic's and metatrain's classes, and on a GPU it is
/// one CUDA graph: arrays have some room to spare, so that the graph serves until a structure grows
/// out of them, and then it is captured anew. Lengths are in Å and energies in eV.
class PetStep {
  public:
    /// Why `model` cannot be used so, or "" if it can; then it runs as in every metatomic engine.
    ///
    /// @param model an exported metatomic model, or a module in one
    /// @param energy the output that is the energy
    /// @param uncertainty whether the uncertainty of its atoms' values is wanted, too
    static std::string
    why_not(const torch::jit::Module &model, const std::string &energy, bool uncertainty);

    /// @param model as above, one that `why_not` has nothing against, on the device where it is to
    ///     run, in whatever modes its layers are, with frozen parameters, whose values must not
    ///     change as long as this lives: the kernels keep them in a form of their own, which serves
    ///     all products with these parameters, one at a time
    /// @param energy, uncertainty as above
    /// @throws c10::Error if there is no such model
    PetStep(const torch::jit::Module &model, const std::string &energy, bool uncertainty);
    /// @param spare the part of the arrays' rows to have free when a graph is captured, in place of
    ///     the usual one: 0.5 % on a GPU, and none on the CPU. Negative: none; then there is no
    ///     graph, and arrays are as large as they must be.
    PetStep(
        const torch::jit::Module &model, const std::string &energy, bool uncertainty, double spare
    );
    ~PetStep();

    /// The structure that `evaluate` gets next.
    ///
    /// @param species [atoms], atomic types, integers
    /// @param pairs [pairs, 5], integers: first atom, second atom and the cell shift of the second
    ///     one. Each pair is there once, in one direction. All closer than the model's cutoff now
    ///     and until the next call; others do not matter.
    /// @param owned the energy is that of so many atoms, the first ones
    void set_structure(const at::Tensor &species, const at::Tensor &pairs, int64_t owned);

    /// Tensors on the CPU, in FP64.
    struct Result {
        /// [owned]
        at::Tensor energies;
        /// [owned], of the energies; not defined if they are not wanted
        at::Tensor uncertainties;
        /// [atoms, 3]: of the energy with respect to positions
        at::Tensor position_gradient;
        /// [3, 3]: of the energy with respect to the strain S in `positions·S` and `cell·S`
        at::Tensor strain_gradient;
    };

    /// @param positions [atoms, 3], floating point; energies are NaN if one of them is not finite
    /// @param cell [3, 3], rows are the cell vectors, zeros where it is not periodic
    /// @throws c10::Error if sizes are not those of the structure, or there is none
    Result evaluate(const at::Tensor &positions, const at::Tensor &cell);

    /// What the forward pass keeps for the backward pass: everything, or (lean) only what goes from
    /// one layer of the graph neural network to the next, from where the backward pass computes the
    /// rest once more. Fast at first.
    void set_lean(bool lean);
    bool lean() const;

    /// How often a graph was captured.
    int64_t captures() const;
    /// Why steps cannot be CUDA graphs; "" if they can.
    const std::string &graph_problem() const;
    /// What went wrong when the graph was to be captured, after which steps go on without; else "".
    const std::string &capture_problem() const;
    /// The most bytes that tensors had on the device when a graph was captured. That starts
    /// PyTorch's count of it again.
    int64_t peak_memory() const;
    /// Bytes that the graph needs while it runs; 0 without one.
    int64_t graph_memory() const;
    /// Gives the memory of the graph back. Of the next two steps the second captures it again.
    void release();

  private:
    struct Implementation;
    std::unique_ptr<Implementation> implementation;
};

} // namespace metatomic_tc
