/* SPDX-License-Identifier: BSD-3-Clause */
/* Where in the range of process numbers a kernel starts. CRIU needs the same numbers again, on this
 * node or on another, so each kernel begins at a random place of its own. */
#ifndef KC_PIDSLOT_H
#define KC_PIDSLOT_H

#include <sys/types.h>

/* Moves the counter so that the next fork gets a number in a free stretch. Never fails: where it
 * may not, the counter stays as it is. Takes at most about half a second. */
void pidslot_choose(void);

/* Moves the counter away from the numbers that are wanted, so that they do not go to the programs
 * that restore, or to others meanwhile. Never fails: where it may not, the counter stays. */
void pidslot_keep_clear(const pid_t *wanted, size_t count);

/* A slot in [pid_max / 4, pid_max * 9 / 10) from 64 random bits. */
pid_t pidslot_random(long pid_max, unsigned long long random);

#endif
