/* SPDX-License-Identifier: BSD-3-Clause */
/* The TCP connections of a tree after CRIU. CRIU puts each connection that it dumps into repair mode,
 * in which nothing is sent, and ends that only where it lets the tasks run itself: not with
 * --leave-stopped, and not when it was killed. */
#ifndef KC_REPAIR_H
#define KC_REPAIR_H

#include "tree.h"

/* Before CRIU: remembers SO_REUSEADDR of the tree's TCP sockets, which repair mode overwrites. */
void repair_note(const struct tree *tree);
/* Before the tree runs again: ends repair mode wherever it is on. */
void repair_end(const struct tree *tree);

#endif
