/* SPDX-License-Identifier: BSD-3-Clause */
/* Capabilities of this process, by system call. Everything is permitted only until raised. */
#ifndef KC_CAPS_H
#define KC_CAPS_H

#include <stdbool.h>
#include <stdint.h>

#include "result.h"

/* Reads what this process was started with; call once, first. */
bool caps_init(struct kc_result *result);
bool caps_root(void);
bool caps_permitted(int capability);
/* True when this process may do more than whoever started it. */
bool caps_beyond_caller(void);
/* The set that a process it starts (not CRIU) may have at most. */
uint64_t caps_callers_own(void);
/* The same of the inheritable set, which programs with file capabilities add to. */
uint64_t caps_callers_inheritable(void);
/* Effective exactly while something needs it. Root holds everything effective anyway. */
bool caps_raise(int capability);
void caps_lower(void);
/* Everything permitted: to look into a process that has capabilities too, one needs all of them. */
void caps_raise_all(void);
/* In the forked child that becomes CRIU, and only there. */
bool caps_give_to_criu(void);
/* In the forked child that becomes the kernel: ambient set as the caller had it, nothing permitted
 * beyond it. */
bool caps_drop_to_callers(void);
/* Yama's ptrace_scope: 1 (Ubuntu's default) allows ancestors only, which CRIU is not; 3 nobody. */
bool caps_yama_forbids(void);
/* Whether all is there that a capture or a restore takes. */
bool caps_can_capture(struct kc_result *result);
/* Whether CRIU must be told to do without being root. */
bool caps_unprivileged(void);

#endif
