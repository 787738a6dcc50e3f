/* SPDX-License-Identifier: BSD-3-Clause */
/* What a dump has written, and what is not in it. */
#ifndef KC_IMAGES_H
#define KC_IMAGES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "json.h"

/* Bytes of the files in a folder of images, or of those that hold memory. */
uint64_t images_bytes(int images, bool pages_only);
/* Processes that belong to the kernel, and yet are not in its tree (see restore.c): CRIU cannot save
 * them with it, and that must not go unsaid. The value `left_out`. */
void images_report_left_out(pid_t root_pid, struct json *json);

#endif
