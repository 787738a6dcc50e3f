/* SPDX-License-Identifier: BSD-3-Clause */
/* What can go wrong, as a closed list, and the one place that turns it into words. */
#ifndef KC_RESULT_H
#define KC_RESULT_H

#include <stdbool.h>

enum kc_reason {
    KC_OK = 0,
    KC_USAGE,
    KC_NO_CRIU,
    KC_NO_CAPABILITY,
    KC_NOT_YOURS,
    KC_NO_PROCESS,
    KC_PID_IN_USE,
    KC_EXEC_FAILED,
    KC_CRIU_FAILED,
    KC_TIMEOUT,
    KC_CANCELLED,
    KC_NO_SPACE,
    KC_NO_MEMORY,
    KC_GPU_UNSUPPORTED,
    KC_GPU_BUSY,
    KC_GPU_FULL,
    KC_GPU_FAILED,
    KC_GPU_STUCK,
    KC_INTERNAL,
    KC_REASON_COUNT
};

struct kc_result {
    enum kc_reason reason;
    char message[512];
};

/* The stable name that goes into JSON. */
const char *kc_reason_name(enum kc_reason reason);
/* A sentence for people, used when the failing place gives none of its own. */
const char *kc_reason_words(enum kc_reason reason);

/* Sets the reason and the message, and returns false, so that a caller may write
 * `return kc_fail(...)`. The first failure wins: a later one is a consequence. */
bool kc_fail(struct kc_result *result, enum kc_reason reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The same with the text of an errno value appended. */
bool kc_fail_errno(struct kc_result *result, enum kc_reason reason, int error, const char *format,
                   ...) __attribute__((format(printf, 4, 5)));

/* Log line for people on stderr. */
void kc_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
