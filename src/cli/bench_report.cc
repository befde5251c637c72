#include "cli/bench_report.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <string_view>
#include <utility>

#include "chat/json.h"
#include "cli/terminal.h"

namespace calla {
namespace {

std::string format(const char* pattern, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof(text), pattern, arguments);
  va_end(arguments);
  return text;
}

std::string escape_xml(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

Json points_json(const std::vector<BenchPoint>& points, const char* length) {
  Json json = Json::array();
  for (const BenchPoint& p : points) {
    Json entry = {{length, p.tokens}, {"tokens_per_s", p.tokens_per_s}, {"slowest", p.low}, {"fastest", p.high}};
    if (p.limit > 0) {
      entry["limit_tokens_per_s"] = p.limit;
      entry["fraction_of_limit"] = p.tokens_per_s / p.limit;
    }
    json.push_back(entry);
  }
  return json;
}

// One panel: tokens/s over length, both axes logarithmic in x and from zero in y.
std::string panel(const std::string& title, const std::string& x_label, const std::vector<BenchPoint>& points,
                  double left) {
  constexpr double kWidth = 380, kHeight = 240, kTop = 60;
  double top = 1;
  for (const BenchPoint& p : points) top = std::max({top, p.high, p.limit});
  const double step = std::pow(10, std::floor(std::log10(top)));
  const double y_max = std::ceil(top / step * 2) / 2 * step;
  const double x_min = std::log2(std::max(points.front().tokens, 1)),
               x_max = std::log2(std::max(points.back().tokens, 2));
  const auto x = [&](int tokens) {
    return left + (x_max > x_min ? (std::log2(std::max(tokens, 1)) - x_min) / (x_max - x_min) : 0.5) * kWidth;
  };
  const auto y = [&](double value) { return kTop + kHeight * (1 - value / y_max); };
  std::string svg = format("<text x='%.0f' y='%.0f' class='t'>%s</text>\n", left, kTop - 14, title.c_str());
  for (int i = 0; i <= 5; ++i) {
    const double value = y_max * i / 5;
    svg += format(
        "<line x1='%.0f' x2='%.0f' y1='%.1f' y2='%.1f' class='g'/><text x='%.0f' y='%.1f' class='a' "
        "text-anchor='end'>%s</text>\n",
        left, left + kWidth, y(value), y(value), left - 6, y(value) + 4, with_commas(value).c_str());
  }
  std::string line, limit;
  for (const BenchPoint& p : points) {
    line += format("%s%.1f %.1f", line.empty() ? "M" : " L", x(p.tokens), y(p.tokens_per_s));
    if (p.limit > 0) limit += format("%s%.1f %.1f", limit.empty() ? "M" : " L", x(p.tokens), y(p.limit));
    svg += format(
        "<line x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f' class='e'/><circle cx='%.1f' cy='%.1f' r='3.5' class='p'/>"
        "<text x='%.1f' y='%.0f' class='a' text-anchor='middle'>%s</text>\n",
        x(p.tokens), x(p.tokens), y(p.low), y(p.high), x(p.tokens), y(p.tokens_per_s), x(p.tokens), kTop + kHeight + 18,
        p.tokens >= 1024 ? format("%dK", p.tokens / 1024).c_str() : format("%d", p.tokens).c_str());
  }
  if (!limit.empty()) svg += "<path d='" + limit + "' class='m'/>\n";
  svg += "<path d='" + line + "' class='l'/>\n";
  svg += format("<text x='%.0f' y='%.0f' class='a' text-anchor='middle'>%s</text>\n", left + kWidth / 2,
                kTop + kHeight + 38, x_label.c_str());
  return svg;
}

// The kernels of a step, the slowest first.
std::string profile_table(const BenchProfile& profile, double bandwidth) {
  std::vector<KernelTime> kernels = profile.kernels;
  std::sort(kernels.begin(), kernels.end(),
            [](const KernelTime& a, const KernelTime& b) { return a.seconds > b.seconds; });
  double sum = 0;
  for (const KernelTime& k : kernels) sum += k.seconds;
  std::string text =
      "\n" + profile.what + ", each part timed alone: " + human_seconds(sum) + "\n" +
      format("%-44s %8s %10s %8s %10s %9s %9s\n", "part", "times", "us each", "share", "MB each", "GB/s", "of limit");
  for (const KernelTime& k : kernels) {
    text += format("%-44.44s %8d %10.1f %7.1f%%", k.name.c_str(), k.launches, k.seconds / k.launches * 1e6,
                   100 * k.seconds / sum);
    if (profile.counted && k.bytes > 0) {
      text += format(" %10.2f %9.0f", k.bytes / k.launches / 1e6, k.bytes / k.seconds / 1e9);
      if (bandwidth > 0) text += format(" %7.0f %%", 100 * k.bytes / k.seconds / bandwidth);
    }
    text += "\n";
  }
  return text;
}

Json profile_json(const BenchProfile& profile) {
  Json parts = Json::array();
  for (const KernelTime& k : profile.kernels) {
    Json part = {{"name", k.name}, {"times", k.launches}, {"seconds", k.seconds}};
    if (profile.counted && k.bytes > 0) part["bytes"] = k.bytes;
    parts.push_back(std::move(part));
  }
  return {{"step", profile.what}, {"parts", std::move(parts)}};
}

}  // namespace

std::string bench_table(const BenchReport& report) {
  std::string text = report.model + " on " + report.backend + "\n" + report.machine + "\n";
  if (report.read_bandwidth > 0)
    text += format("read bandwidth %.1f GB/s (probed in this run); %s a token without context\n",
                   report.read_bandwidth / 1e9, human_bytes(report.bytes_per_token).c_str());
  const auto rows = [&](const char* title, const char* length, const std::vector<BenchPoint>& points) {
    if (points.empty()) return;
    const bool limited = std::any_of(points.begin(), points.end(), [](const BenchPoint& p) { return p.limit > 0; });
    text += format("\n%s\n%10s %12s %22s", title, length, "tokens/s", "slowest .. fastest");
    text += limited ? format(" %12s %10s\n", "limit", "of limit") : "\n";
    for (const BenchPoint& p : points) {
      const std::string range = with_commas(p.low, 1) + " .. " + with_commas(p.high, 1);
      text += format("%10d %12s %22s", p.tokens, with_commas(p.tokens_per_s, 1).c_str(), range.c_str());
      if (p.limit > 0)
        text += format(" %12s %8.0f %%", with_commas(p.limit, 1).c_str(), 100 * p.tokens_per_s / p.limit);
      text += "\n";
    }
  };
  rows(format("prefill, median of %d", report.repetitions).c_str(), "prompt", report.prefill);
  rows(format("decode, median of %d", report.repetitions).c_str(), "context", report.decode);
  for (const BenchProfile& profile : report.profiles) text += profile_table(profile, report.read_bandwidth);
  return text;
}

std::string bench_json(const BenchReport& report) {
  Json json = {{"model", report.model},
               {"backend", report.backend},
               {"machine", report.machine},
               {"read_bandwidth_bytes_per_s", report.read_bandwidth},
               {"bytes_per_token_at_context_0", report.bytes_per_token},
               {"repetitions", report.repetitions},
               {"load_seconds", report.load_seconds},
               {"prefill", points_json(report.prefill, "prompt_tokens")},
               {"decode", points_json(report.decode, "context_tokens")}};
  for (const BenchProfile& profile : report.profiles) json["profiles"].push_back(profile_json(profile));
  return json.dump(2) + "\n";
}

std::string bench_svg(const BenchReport& report) {
  std::string svg =
      "<svg xmlns='http://www.w3.org/2000/svg' width='960' height='370' viewBox='0 0 960 370' "
      "font-family='sans-serif'>\n"
      "<style>.t{font-size:15px;font-weight:bold}.a{font-size:11px;fill:#444}.g{stroke:#ddd}.e{stroke:#1f77b4}"
      ".p{fill:#1f77b4}.l{fill:none;stroke:#1f77b4;stroke-width:2}.m{fill:none;stroke:#999;stroke-dasharray:5 "
      "4}</style>\n"
      "<rect width='960' height='370' fill='white'/>\n";
  svg += "<text x='16' y='22' class='a'>" + escape_xml(report.model + " on " + report.backend) +
         "; dashed: limit by bytes moved</text>\n";
  if (!report.prefill.empty()) svg += panel("Prefill, tokens/s", "prompt length, tokens", report.prefill, 70);
  if (!report.decode.empty()) svg += panel("Decode, tokens/s", "context length, tokens", report.decode, 550);
  return svg + "</svg>\n";
}

std::string lilys_gain(const std::string& mechanism) {
  static constexpr std::pair<std::string_view, const char*> kGains[] = {
      {"fused-dequant", "prefill +77.4 % at 512"},
      {"gpu-routing", "prefill +89 % at 512"},
      {"wide-tiles", "prefill +13.2 % at 2K"},
      {"register-scan", "prefill +5.6 % at 2K"},
      {"coalesced-kv", "decode +2.1 % at 3,840"},
      {"gqa-packing", "decode +23.8 % at 32K"},
      {"split-kv", "decode +7.7 / +27.4 / +40.2 % at 32K / 64K / 128K"},
  };
  for (const auto& [name, gain] : kGains)
    if (name == mechanism) return gain;
  return "";
}

std::string ablation_table(const AblationReport& report) {
  std::string text =
      report.model + " on " + report.backend + "\n" +
      format("what each mechanism brings: tokens/s with and without it, gain; medians of %d, alternating\n\n",
             report.repetitions);
  text += format("%-18s", "mechanism");
  for (int prompt : report.prompts) text += format(" %28s", format("prefill of %d", prompt).c_str());
  for (int context : report.contexts) text += format(" %28s", format("decode at %d", context).c_str());
  text += "  Lily's figure (M5 Max)\n";
  for (const AblationRow& row : report.rows) {
    text += format("%-18s", row.mechanism.c_str());
    if (row.at.empty()) text += " not measured: " + row.problem;
    for (const AblationRow::Rates& rates : row.at)
      text += format(" %10s %9s %+6.1f %%", with_commas(rates.with, 1).c_str(), with_commas(rates.without, 1).c_str(),
                     100 * rates.gain());
    const std::string published = lilys_gain(row.mechanism);
    text += "  " + (published.empty() ? "-" : published) + "\n";
  }
  return text;
}

std::string ablation_json(const AblationReport& report) {
  Json mechanisms = Json::array();
  for (const AblationRow& row : report.rows) {
    Json entry = {{"mechanism", row.mechanism}, {"lily", lilys_gain(row.mechanism)}};
    if (row.at.empty()) entry["problem"] = row.problem;
    for (size_t i = 0; i < row.at.size(); ++i) {
      const bool is_prompt = i < report.prompts.size();
      entry["points"].push_back({{"phase", is_prompt ? "prefill" : "decode"},
                                 {"tokens", is_prompt ? report.prompts[i] : report.contexts[i - report.prompts.size()]},
                                 {"with_tokens_per_s", row.at[i].with},
                                 {"without_tokens_per_s", row.at[i].without},
                                 {"gain", row.at[i].gain()}});
    }
    mechanisms.push_back(entry);
  }
  const Json json = {{"model", report.model},
                     {"backend", report.backend},
                     {"repetitions", report.repetitions},
                     {"mechanisms", mechanisms}};
  return json.dump(2) + "\n";
}

}  // namespace calla
