// Python bindings of selection and of sparse vectors: addresses of tensors as integers, sparse
// vectors as numpy arrays. All of it runs without the interpreter's lock.
#include "sparse_bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "element.hpp"
#include "index_code.hpp"
#include "int8.hpp"
#include "selection.hpp"
#include "sparse_merge.hpp"
#include "sparse_vector.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

namespace {

using syncline::Dtype;
using syncline::Instructions;

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span_of(const Array<T>& array) {
    return {array.data(), array.shape(0)};
}

// Hands a vector over to numpy without copying it.
template <typename T, typename As = T, typename Allocator = std::allocator<T>>
nb::ndarray<nb::numpy, As, nb::ndim<1>> numpy(std::vector<T, Allocator>&& values) {
    using Values = std::vector<T, Allocator>;
    auto kept = std::make_unique<Values>(std::move(values));
    auto* data = reinterpret_cast<As*>(kept->data());
    const std::size_t size = kept->size();
    nb::capsule owner(kept.release(), [](void* p) noexcept { delete static_cast<Values*>(p); });
    return {data, {size}, owner};
}

syncline::SparseView view_of(const Array<std::uint32_t>& indices, const Array<float>& values) {
    if (indices.shape(0) != values.shape(0)) {
        throw std::invalid_argument("as many indices as values are needed");
    }
    return {span_of(indices), span_of(values)};
}

Instructions instructions_of(int chosen) {
    if (chosen < 0) return syncline::widest_instructions();
    return static_cast<Instructions>(chosen);
}

// The addresses of values, gradient and velocity (0: none), and the number of elements.
using Addresses = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::size_t>;

nb::tuple select_largest(const std::vector<Addresses>& addresses, float momentum, std::size_t k,
                         std::size_t least, std::size_t most, std::uint32_t hint, bool clear,
                         int instructions) {
    std::vector<syncline::Part> parts;
    parts.reserve(addresses.size());
    for (const auto& [values, gradient, velocity, count] : addresses) {
        parts.push_back({reinterpret_cast<float*>(values), reinterpret_cast<const float*>(gradient),
                         reinterpret_cast<float*>(velocity), count});
    }
    syncline::Selection selection;
    {
        const syncline::Unlocked unlocked;
        selection = syncline::select(parts, momentum, {k, least, most, hint}, clear,
                                     instructions_of(instructions));
    }
    return nb::make_tuple(numpy(std::move(selection.taken.indices)),
                          numpy(std::move(selection.taken.values)), selection.threshold,
                          selection.finite, selection.exact);
}

std::size_t first_not_finite(std::uintptr_t values, std::size_t count, int instructions) {
    const syncline::Unlocked unlocked;
    return syncline::first_not_finite(reinterpret_cast<const float*>(values), count,
                                      instructions_of(instructions));
}

nb::tuple sparse_merge(const Array<std::uint32_t>& indices_a, const Array<float>& values_a,
                       const Array<std::uint32_t>& indices_b, const Array<float>& values_b,
                       const Array<std::uint64_t>& ends, const Array<std::uint64_t>& counts) {
    if (ends.shape(0) != counts.shape(0)) throw std::invalid_argument("an end for each count");
    std::vector<syncline::Quota> parts;
    for (std::size_t i = 0; i < ends.shape(0); ++i) parts.push_back({ends(i), counts(i)});
    const syncline::SparseView a = view_of(indices_a, values_a);
    const syncline::SparseView b = view_of(indices_b, values_b);
    syncline::Kept result;
    {
        const syncline::Unlocked unlocked;
        result = syncline::keep_largest(syncline::sum_of(a, b), parts);
    }
    return nb::make_tuple(
        numpy(std::move(result.kept.indices)), numpy(std::move(result.kept.values)),
        numpy(std::move(result.dropped.indices)), numpy(std::move(result.dropped.values)));
}

nb::tuple sparse_divide(const Array<std::uint32_t>& indices, const Array<float>& values,
                        const Array<std::uint32_t>& chosen) {
    const syncline::SparseView entries = view_of(indices, values);
    syncline::Divided result;
    {
        const syncline::Unlocked unlocked;
        result = syncline::divided(entries, span_of(chosen));
    }
    return nb::make_tuple(
        numpy(std::move(result.chosen.indices)), numpy(std::move(result.chosen.values)),
        numpy(std::move(result.others.indices)), numpy(std::move(result.others.values)));
}

auto code_indices(const Array<std::uint32_t>& indices) {
    syncline::RecycledVector<std::byte> bytes;
    {
        const syncline::Unlocked unlocked;
        bytes = syncline::coded(span_of(indices));
    }
    return numpy<std::byte, std::uint8_t>(std::move(bytes));
}

nb::tuple decode_indices(const Array<std::uint8_t>& bytes, std::size_t count,
                         std::size_t universe) {
    // Every index takes two bytes or more, so an impossible count is refused before memory is
    // allocated.
    if (count > bytes.shape(0) / 2) throw std::invalid_argument("the indices end early");
    syncline::RecycledVector<std::uint32_t> indices(count);
    std::size_t taken = 0;
    {
        const syncline::Unlocked unlocked;
        taken = syncline::decode(std::as_bytes(span_of(bytes)), universe, indices);
    }
    return nb::make_tuple(numpy(std::move(indices)), taken);
}

Dtype dtype_of(int dtype) { return static_cast<Dtype>(dtype); }

auto narrow(const Array<float>& values, int dtype) {
    std::vector<std::uint16_t> result(values.shape(0));
    syncline::narrowed(dtype_of(dtype), values.data(), result.data(), result.size());
    return numpy(std::move(result));
}

auto widen(const Array<std::uint16_t>& values, int dtype) {
    std::vector<float> result(values.shape(0));
    syncline::widened(dtype_of(dtype), values.data(), result.data(), result.size());
    return numpy(std::move(result));
}

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }

void add_scaled(int dtype, std::uintptr_t values, std::uintptr_t arrived, std::size_t count,
                float factor, bool last) {
    const syncline::Unlocked unlocked;
    syncline::add_scaled(dtype_of(dtype), floats(values), reinterpret_cast<void*>(arrived), count,
                         factor, last);
}

void scaled(std::uintptr_t values, std::uintptr_t result, std::size_t count, float factor) {
    const syncline::Unlocked unlocked;
    syncline::scaled(floats(values), reinterpret_cast<std::uint16_t*>(result), count, factor);
}

void int8_take(std::uintptr_t values, std::uintptr_t residual, std::size_t count, float factor) {
    const syncline::Unlocked unlocked;
    syncline::int8_take(floats(values), floats(residual), count, factor);
}

void int8_encode(std::uintptr_t values, std::uintptr_t residual, std::size_t count, float factor,
                 std::uintptr_t encoded) {
    const syncline::Unlocked unlocked;
    syncline::int8_encode(floats(values), floats(residual), count, factor,
                          reinterpret_cast<std::uint8_t*>(encoded));
}

void int8_decode(std::uintptr_t encoded, std::size_t count, std::uintptr_t values, bool add) {
    const syncline::Unlocked unlocked;
    syncline::int8_decode(reinterpret_cast<const std::uint8_t*>(encoded), count, floats(values),
                          add);
}

}  // namespace

void bind_sparse(nb::module_& module) {
    module.def("select", &select_largest, nb::arg("parts"), nb::arg("momentum"), nb::arg("k"),
               nb::arg("least"), nb::arg("most"), nb::arg("hint"), nb::arg("clear"),
               nb::arg("instructions"),
               "Update the float32 values of a vector in parts and take the k largest.");
    module.def("sparse_divide", &sparse_divide, nb::arg("indices"), nb::arg("values"),
               nb::arg("chosen"), "Return the entries of the chosen indices, and the others.");
    module.def("first_not_finite", &first_not_finite, nb::arg("values"), nb::arg("count"),
               nb::arg("instructions"), "Return the first infinite or NaN element, or the count.");
    module.def(
        "has_instructions",
        [](int i) { return syncline::has_instructions(static_cast<Instructions>(i)); },
        nb::arg("instructions"), "Whether the processor has 0: any, 1: AVX2, 2: AVX-512.");
    module.def(
        "sparse_merge", &sparse_merge, nb::arg("indices_a"), nb::arg("values_a"),
        nb::arg("indices_b"), nb::arg("values_b"), nb::arg("ends"), nb::arg("counts"),
        "Return the largest entries of each part of a sum of sparse vectors, and the others.");
    module.def("code_indices", &code_indices, nb::arg("indices"),
               "Return ascending indices as distances of 16 bits.");
    module.def("decode_indices", &decode_indices, nb::arg("bytes"), nb::arg("count"),
               nb::arg("universe"), "Return the indices, and how many bytes they took.");
    module.def("longest_code", &syncline::longest_code, nb::arg("count"), nb::arg("universe"),
               "Return the most bytes that so many coded indices take.");
    module.def("narrow", &narrow, nb::arg("values"), nb::arg("dtype"),
               "Round float32 to bfloat16 (2) or float16 (3).");
    module.def("widen", &widen, nb::arg("values"), nb::arg("dtype"),
               "Return bfloat16 (2) or float16 (3) as float32.");
    module.def(
        "add_scaled", &add_scaled, nb::arg("dtype"), nb::arg("values"), nb::arg("arrived"),
        nb::arg("count"), nb::arg("factor"), nb::arg("last"),
        "Add what arrived in a ring to factor * values; the values are the sum if it is last.");
    module.def("scaled", &scaled, nb::arg("values"), nb::arg("result"), nb::arg("count"),
               nb::arg("factor"), "Round factor * values to bfloat16.");
    module.def("int8_take", &int8_take, nb::arg("values"), nb::arg("residual"), nb::arg("count"),
               nb::arg("factor"), "Add residuals to a multiple of the values, and clear them.");
    module.def("int8_encode", &int8_encode, nb::arg("values"), nb::arg("residual"),
               nb::arg("count"), nb::arg("factor"), nb::arg("encoded"),
               "Add residuals to a multiple of the values, and round these to 8 bits.");
    module.def("int8_decode", &int8_decode, nb::arg("encoded"), nb::arg("count"), nb::arg("values"),
               nb::kw_only(), nb::arg("add"), "Replace values by encoded ones, or add these.");
}
