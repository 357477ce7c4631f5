#include "gradients.hpp"

#include <bit>
#include <limits>
#include <stdexcept>

namespace syncline {

namespace {

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Twice the longest: sums of rounded times can be a little longer than the time they add up to.
bool is_time(std::int64_t ns) { return ns >= 0 && ns <= 2 * longest_ns; }

constexpr std::int64_t pieces = 64;  // of a tensor, allowed for in the sums
constexpr std::int64_t longest_sum = std::int64_t{1} << 60;

}  // namespace

Gradients::Gradients(const Round& round, const CostCurve& cost)
    : cost_(cost),
      ready_(round.ready_ns),
      elements_(round.elements),
      element_bytes_(round.element_bytes),
      latency_ns_(cost(0)),
      overlap_(round.in_flight >= 2) {
    const std::size_t n = ready_.size();
    require(
        n > 0 && elements_.size() == n && element_bytes_.size() == n && round.tail_ns.size() == n,
        "a round needs as many ready times as sizes and tails, and at least one");
    require(round.in_flight == 1 || round.in_flight == 2, "one or two messages are in flight");
    offset_bytes_.assign(n + 1, 0);
    offset_elements_.assign(n + 1, 0);
    std::int64_t longest = 0;  // of many messages, sent one by one
    for (std::size_t i = 0; i < n; ++i) {
        require(elements_[i] > 0 && element_bytes_[i] > 0, "a tensor of a round is not empty");
        require(is_time(ready_[i]) && is_time(round.tail_ns[i]),
                "a time of a round is negative or too long");
        require(i == 0 || ready_[i] >= ready_[i - 1], "ready times must not decrease");
        const std::int64_t room = std::numeric_limits<std::int64_t>::max() - offset_bytes_[i];
        require(elements_[i] <= room / element_bytes_[i],
                "the sizes add up to more than 64 bits hold");
        offset_bytes_[i + 1] = offset_bytes_[i] + elements_[i] * element_bytes_[i];
        offset_elements_[i + 1] = offset_elements_[i] + elements_[i];
        longest += cost_(elements_[i] * element_bytes_[i]) + pieces * latency_ns_;
        require(longest <= longest_sum, "the messages of a round take too long");
    }
    require(cost_(offset_bytes_[n]) <= longest_ns, "a message takes longer than 19.5 hours");
    element_bytes_.push_back(1);
    tails_.push_back(round.tail_ns);
    for (std::size_t span = 1; 2 * span <= n; span *= 2) {
        const std::vector<std::int64_t>& half = tails_.back();
        std::vector<std::int64_t> whole(n + 1 - 2 * span);
        for (std::size_t i = 0; i < whole.size(); ++i) {
            whole[i] = std::max(half[i], half[i + span]);
        }
        tails_.push_back(std::move(whole));
    }
}

Cut Gradients::cut_at(std::int64_t element) const {
    require(0 <= element && element <= all_elements(), "a slice ends beyond the gradients");
    const auto after = std::ranges::upper_bound(offset_elements_, element);
    const auto tensor = static_cast<std::int32_t>(after - offset_elements_.begin()) - 1;
    return {tensor, element - offset_elements_[at(tensor)]};
}

Message Gradients::message(Cut begin, Cut end) const {
    const std::size_t first = at(begin.tensor);
    const std::size_t last = at(end.element > 0 ? end.tensor : end.tensor - 1);
    const auto level = static_cast<std::size_t>(std::bit_width(last - first + 1) - 1);
    Message message;
    message.ready_ns = ready_[last];
    message.transmission_ns = transmission_ns(bytes(end) - bytes(begin));
    message.tail_ns =
        std::max(tails_[level][first], tails_[level][last + 1 - (std::size_t{1} << level)]);
    message.begin = begin;
    message.end = end;
    return message;
}

Cut Gradients::furthest(Cut from, Cut to, std::int64_t limit_ns) const {
    if (transmission_ns(bytes(to) - bytes(from)) <= limit_ns) return to;
    const std::int64_t size = element_bytes_[at(from.tensor)];
    std::int64_t fits = 0;
    std::int64_t exceeds = (bytes(to) - bytes(from)) / size;
    while (exceeds - fits > 1) {
        const std::int64_t middle = fits + (exceeds - fits) / 2;
        (transmission_ns(middle * size) <= limit_ns ? fits : exceeds) = middle;
    }
    return cut(from.tensor, from.element + fits);
}

Cut Gradients::nearest(Cut from, Cut to, std::int64_t limit_ns) const {
    if (transmission_ns(bytes(to) - bytes(from)) <= limit_ns) return from;
    const std::int64_t size = element_bytes_[at(from.tensor)];
    const std::int64_t all = (bytes(to) - bytes(from)) / size;
    std::int64_t fits = 0;
    std::int64_t exceeds = all;
    while (exceeds - fits > 1) {
        const std::int64_t middle = fits + (exceeds - fits) / 2;
        (transmission_ns(middle * size) <= limit_ns ? fits : exceeds) = middle;
    }
    return cut(from.tensor, from.element + all - fits);
}

Cut Gradients::inside(Cut begin, Cut end, double share) const {
    const std::int64_t first = bytes(begin);
    const std::int64_t target =
        first + static_cast<std::int64_t>(static_cast<double>(bytes(end) - first) * share);
    const auto after = std::ranges::upper_bound(offset_bytes_, target);
    const auto tensor = static_cast<std::int32_t>(after - offset_bytes_.begin()) - 1;
    if (tensor >= count()) return begin;
    const std::int64_t within = target - offset_bytes_[at(tensor)];
    Cut place = cut(tensor, within / element_bytes_[at(tensor)]);
    if (place <= begin) place = cut(begin.tensor, begin.element + 1);
    return place < end ? place : begin;
}

std::int64_t Gradients::end_ns(const Messages& messages) const {
    Channel channel;
    std::int64_t end = 0;
    for (const Message& message : messages) {
        const std::int64_t arrived = channel.send(message, latency_ns_, overlap_);
        end = std::max(end, arrived + message.tail_ns);
    }
    return end;
}

}  // namespace syncline
