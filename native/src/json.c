/* SPDX-License-Identifier: BSD-3-Clause */
#include "json.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "io.h"

static void put(struct json *json, const char *text, size_t length)
{
    if (json->overflow || length > JSON_CAPACITY - 2 - json->length) {
        json->overflow = true;
        return;
    }
    memcpy(json->text + json->length, text, length);
    json->length += length;
}

static void put_text(struct json *json, const char *text)
{
    put(json, text, strlen(text));
}

/* Length of the UTF-8 sequence at `s`, 0 when it is not one (overlong forms and surrogates are not). */
static size_t utf8_length(const unsigned char *s, size_t left)
{
    if (s[0] < 0x80)
        return 1;
    size_t need;
    unsigned long code;
    unsigned long least;
    if (s[0] >= 0xc2 && s[0] <= 0xdf) {
        need = 2;
        code = s[0] & 0x1fu;
        least = 0x80;
    } else if (s[0] >= 0xe0 && s[0] <= 0xef) {
        need = 3;
        code = s[0] & 0x0fu;
        least = 0x800;
    } else if (s[0] >= 0xf0 && s[0] <= 0xf4) {
        need = 4;
        code = s[0] & 0x07u;
        least = 0x10000;
    } else {
        return 0;
    }
    if (left < need)
        return 0;
    for (size_t i = 1; i < need; i++) {
        if ((s[i] & 0xc0) != 0x80)
            return 0;
        code = (code << 6) | (s[i] & 0x3fu);
    }
    if (code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
        return 0;
    return need;
}

static void put_quoted(struct json *json, const char *value, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)value;
    put(json, "\"", 1);
    for (size_t i = 0; i < length;) {
        unsigned char c = bytes[i];
        if (c == '"' || c == '\\') {
            char escaped[2] = {'\\', (char)c};
            put(json, escaped, 2);
            i++;
        } else if (c < 0x20 || c == 0x7f) {
            char escaped[8];
            snprintf(escaped, sizeof(escaped), "\\u%04x", (unsigned)c);
            put_text(json, escaped);
            i++;
        } else {
            size_t n = utf8_length(bytes + i, length - i);
            if (n == 0) {
                put_text(json, "\xef\xbf\xbd");
                i++;
            } else {
                put(json, value + i, n);
                i += n;
            }
        }
    }
    put(json, "\"", 1);
}

static void put_key(struct json *json, const char *key)
{
    if (!json->first[json->depth])
        put(json, ",", 1);
    json->first[json->depth] = false;
    if (key != NULL) {
        put_quoted(json, key, strlen(key));
        put(json, ":", 1);
    }
}

void json_begin(struct json *json, const char *event)
{
    json->length = 0;
    json->depth = 0;
    json->overflow = false;
    json->first[0] = true;
    json->text[0] = '\0';
    put(json, "{", 1);
    json_string(json, "event", event);
}

void json_string_n(struct json *json, const char *key, const char *value, size_t length)
{
    put_key(json, key);
    put_quoted(json, value, length);
}

void json_string(struct json *json, const char *key, const char *value)
{
    if (value == NULL)
        json_null(json, key);
    else
        json_string_n(json, key, value, strlen(value));
}

void json_text(struct json *json, const char *key, const char *value, size_t capacity)
{
    size_t length = strnlen(value, capacity);
    if (length == 0)
        json_null(json, key);
    else
        json_string_n(json, key, value, length);
}

void json_int(struct json *json, const char *key, int64_t value)
{
    char number[32];
    snprintf(number, sizeof(number), "%" PRId64, value);
    put_key(json, key);
    put_text(json, number);
}

void json_real(struct json *json, const char *key, double value)
{
    if (!isfinite(value)) {
        json_null(json, key);
        return;
    }
    char number[64];
    snprintf(number, sizeof(number), "%.6f", value);
    put_key(json, key);
    put_text(json, number);
}

void json_bool(struct json *json, const char *key, bool value)
{
    put_key(json, key);
    put_text(json, value ? "true" : "false");
}

void json_null(struct json *json, const char *key)
{
    put_key(json, key);
    put_text(json, "null");
}

void json_open(struct json *json, const char *key, char bracket)
{
    put_key(json, key);
    put(json, &bracket, 1);
    if (json->depth + 1 >= JSON_DEPTH) {
        json->overflow = true;
        return;
    }
    json->depth++;
    json->first[json->depth] = true;
    json->close[json->depth] = bracket == '{' ? '}' : ']';
}

void json_close(struct json *json)
{
    if (json->depth == 0)
        return;
    put(json, &json->close[json->depth], 1);
    json->depth--;
}

bool json_finish(struct json *json)
{
    while (json->depth > 0)
        json_close(json);
    put(json, "}", 1);
    if (json->overflow)
        return false;
    /* put() always leaves two bytes. */
    json->text[json->length++] = '\n';
    json->text[json->length] = '\0';
    return true;
}

bool json_send(struct json *json, int wait_ms)
{
    if (!json_finish(json)) {
        static const char lost[] = "{\"event\":\"error\",\"reason\":\"internal\","
                                   "\"message\":\"An event did not fit its buffer.\","
                                   "\"criu_errors\":[],\"log\":null}\n";
        return io_write_patiently(STDOUT_FILENO, lost, sizeof(lost) - 1, wait_ms);
    }
    return io_write_patiently(STDOUT_FILENO, json->text, json->length, wait_ms);
}

void event_error(const struct kc_result *result)
{
    static struct json json;
    kc_log("%s: %s", kc_reason_name(result->reason), result->message);
    json_begin(&json, "error");
    json_string(&json, "reason", kc_reason_name(result->reason));
    json_string(&json, "message",
                result->message[0] != '\0' ? result->message : kc_reason_words(result->reason));
    json_open(&json, "criu_errors", '[');
    json_close(&json);
    json_null(&json, "log");
    json_send(&json, 5000);
}
