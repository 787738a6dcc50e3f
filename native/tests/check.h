/* SPDX-License-Identifier: BSD-3-Clause */
/* As much of a test framework as these tests need: a failed check names itself and ends the test. */
#ifndef KC_CHECK_H
#define KC_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK_STRING(got, wanted)                                                                  \
    do {                                                                                           \
        const char *got_ = (got), *wanted_ = (wanted);                                             \
        if (got_ == NULL || strcmp(got_, wanted_) != 0) {                                          \
            fprintf(stderr, "%s:%d: got <%s>, wanted <%s>\n", __FILE__, __LINE__,                  \
                    got_ ? got_ : "(null)", wanted_);                                              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Numbers that are the same in every run (xorshift), so that a failure can be repeated. */
static inline uint64_t check_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* A heap copy of exactly the given size, so that AddressSanitizer sees every step beyond it. */
static inline char *check_copy(const char *text, size_t length)
{
    char *copy = malloc(length + 1);
    CHECK(copy != NULL);
    memcpy(copy, text, length);
    copy[length] = '\0';
    return copy;
}

/* A mangled copy of a sample: bytes changed, cut, doubled. No NUL inside. */
static inline char *check_mangle(const char *sample, uint64_t *state)
{
    size_t length = strlen(sample);
    char *copy = check_copy(sample, length);
    for (unsigned n = 0; n < 1 + check_random(state) % 8 && length > 0; n++) {
        size_t at = check_random(state) % length;
        switch (check_random(state) % 3) {
        case 0:
            copy[at] = (char)(1 + check_random(state) % 255);
            break;
        case 1:
            memmove(copy + at, copy + at + 1, length - at);
            length--;
            break;
        default:
            copy[at] = "0123456789 ()\n:-"[check_random(state) % 16];
            break;
        }
    }
    char *exact = check_copy(copy, length);
    free(copy);
    return exact;
}

#endif
