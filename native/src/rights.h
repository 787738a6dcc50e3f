/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_RIGHTS_H
#define KC_RIGHTS_H

#include <stdbool.h>

#include "result.h"
#include "tree.h"

/* Fills `tree` with a process that must be there and all that descend from it, of which all four user ids must be
 * the caller's, unless root asks. */
bool rights_collect(struct tree *tree, pid_t root, struct kc_result *result);
/* The images are the caller's: they must not give a process rights that the caller has not. All of
 * the tree is stopped and has not run an instruction of its own yet. */
bool rights_check(const struct tree *tree, struct kc_result *result);

#endif
