/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_RIGHTS_H
#define KC_RIGHTS_H

#include <stdbool.h>

#include "result.h"
#include "tree.h"

/* The images are the caller's: they must not give a process rights that the caller has not. All of
 * the tree is stopped and has not run an instruction of its own yet. */
bool rights_check(const struct tree *tree, struct kc_result *result);

#endif
