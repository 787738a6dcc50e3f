/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_RUN_H
#define KC_RUN_H
#include "args.h"
int run_command(const struct args *args);
#endif
