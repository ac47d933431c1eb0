#pragma once

#include <string>

namespace metatomic_tc {

/// `text` as a JSON string, quotes included.
inline std::string json_string(const std::string &text) {
    auto result = std::string("\"");
    for (auto character : text) {
        if (character == '"' || character == '\\') {
            result += '\\';
            result += character;
        } else if (static_cast<unsigned char>(character) < 0x20) {
            constexpr auto digits = "0123456789abcdef";
            result += "\\u00";
            result += digits[character >> 4];
            result += digits[character & 15];
        } else {
            result += character;
        }
    }
    return result + "\"";
}

} // namespace metatomic_tc
