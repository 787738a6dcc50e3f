// SPDX-License-Identifier: BSD-3-Clause
// Faults that a test injects, from the file `faults` in the machine's folder (README.md).
#pragma once

// Call first in every function: delays, hangs or kills as the file says. Returns the code that the
// function is to fail with at once, SIM_FAULT_FAIL, or 0. Counts the call.
int sim_fault(const char *symbol);

// What a function returns in place of `result` after it did its work.
int sim_fault_after(int result);

enum { SIM_FAULT_FAIL = -1 };
