/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_HOSTMEM_H
#define KC_HOSTMEM_H

#include <stdint.h>
#include <sys/types.h>

/* Bytes of memory that a process could still take without being killed for it: what the machine has
 * available, and what the limits of its control group and of those above leave. -1: not known. `root` is ""
 * but in tests. */
int64_t hostmem_available(const char *root, pid_t pid);
/* Bytes that are on their way to disks. 0 where it is not known. */
int64_t hostmem_unwritten(const char *root);

#endif
