/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_TRUST_H
#define KC_TRUST_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>

/* Resolves `path` to a path without links of which nobody but root and `other` (pass 0 for nobody
 * else) can replace any part. False, with a reason in `why`, when that does not hold. */
bool trust_resolve(const char *path, uid_t other, char resolved[PATH_MAX], const char **why);

#endif
