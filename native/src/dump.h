/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef KC_DUMP_H
#define KC_DUMP_H
#include "args.h"
int dump_command(const struct args *args);
#endif
