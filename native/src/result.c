/* SPDX-License-Identifier: BSD-3-Clause */
#include "result.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    const char *words;
} reasons[KC_REASON_COUNT] = {
    [KC_OK] = {"ok", "Done."},
    [KC_USAGE] = {"usage", "The command line is not valid."},
    [KC_NO_CRIU] = {"no_criu", "No usable CRIU (4.2 or newer) was found."},
    [KC_NO_CAPABILITY] = {"no_capability", "The right to capture processes is missing."},
    [KC_NOT_YOURS] = {"not_yours", "The process belongs to another user."},
    [KC_NO_PROCESS] = {"no_process", "There is no such process."},
    [KC_PID_IN_USE] = {"pid_in_use", "Process numbers that the state needs are in use."},
    [KC_EXEC_FAILED] = {"exec_failed", "The kernel's command could not be started."},
    [KC_CRIU_FAILED] = {"criu_failed", "CRIU could not do it."},
    [KC_TIMEOUT] = {"timeout", "It took too long and was undone."},
    [KC_CANCELLED] = {"cancelled", "It was cancelled and undone."},
    [KC_NO_SPACE] = {"no_space", "There is no space left for the images."},
    [KC_NO_MEMORY] = {"no_memory", "The host has no memory for what is on the GPU."},
    [KC_GPU_UNSUPPORTED] = {"gpu_unsupported", "The GPU or its driver does not allow it."},
    [KC_GPU_BUSY] = {"gpu_busy", "The GPU's work did not end in time."},
    [KC_GPU_FULL] = {"gpu_full", "The GPU has no room for the memory."},
    [KC_GPU_FAILED] = {"gpu_failed", "The GPU driver could not do it."},
    [KC_GPU_STUCK] = {"gpu_stuck", "The GPU could not be given back to the kernel."},
    [KC_INTERNAL] = {"internal", "An unexpected error occurred."},
};

const char *kc_reason_name(enum kc_reason reason)
{
    return reasons[reason < KC_REASON_COUNT ? reason : KC_INTERNAL].name;
}

const char *kc_reason_words(enum kc_reason reason)
{
    return reasons[reason < KC_REASON_COUNT ? reason : KC_INTERNAL].words;
}

bool kc_fail(struct kc_result *result, enum kc_reason reason, const char *format, ...)
{
    if (result->reason != KC_OK)
        return false;
    result->reason = reason;
    va_list args;
    va_start(args, format);
    vsnprintf(result->message, sizeof(result->message), format, args);
    va_end(args);
    return false;
}

bool kc_fail_errno(struct kc_result *result, enum kc_reason reason, int error, const char *format,
                   ...)
{
    if (result->reason != KC_OK)
        return false;
    result->reason = reason;
    va_list args;
    va_start(args, format);
    vsnprintf(result->message, sizeof(result->message), format, args);
    va_end(args);
    size_t used = strlen(result->message);
    snprintf(result->message + used, sizeof(result->message) - used, ": %s", strerror(error));
    return false;
}

void kc_log(const char *format, ...)
{
    char line[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    fprintf(stderr, "kernel-capture: %s\n", line);
}
