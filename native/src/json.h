/* SPDX-License-Identifier: BSD-3-Clause */
/* One event = one JSON object on one line of stdout, from a buffer of fixed size. */
#ifndef KC_JSON_H
#define KC_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "result.h"

/* The longest is `done` with all that there may be of GPUs (cuda_record.c), and whoever reads events takes
 * lines below 1 MiB. */
enum { JSON_CAPACITY = 768 * 1024, JSON_DEPTH = 8 };

struct json {
    size_t length;
    unsigned depth;
    bool overflow;            /* something did not fit: the event is not sent as it is */
    bool first[JSON_DEPTH];   /* no comma needed yet, per nesting level */
    char close[JSON_DEPTH];   /* the bracket that ends each level */
    char text[JSON_CAPACITY];
};

void json_begin(struct json *json, const char *event);
/* A NULL key writes an array element. Strings: control characters are escaped, bytes that are not
 * UTF-8 become U+FFFD, a NULL value becomes null. */
void json_string(struct json *json, const char *key, const char *value);
void json_string_n(struct json *json, const char *key, const char *value, size_t length);
/* Text that ends where its array does at the latest, as in memory that another process writes; null for an empty one. */
void json_text(struct json *json, const char *key, const char *value, size_t capacity);
void json_int(struct json *json, const char *key, int64_t value);
void json_real(struct json *json, const char *key, double value);
void json_bool(struct json *json, const char *key, bool value);
void json_null(struct json *json, const char *key);
void json_open(struct json *json, const char *key, char bracket); /* '{' or '[' */
void json_close(struct json *json);
/* Closes every level. The text ends in a newline; false when it did not fit. */
bool json_finish(struct json *json);
/* Finishes and writes to stdout. Waits at most `wait_ms` for a reader that does not read. */
bool json_send(struct json *json, int wait_ms);

/* The `error` event, without CRIU lines. */
void event_error(const struct kc_result *result);

#endif
