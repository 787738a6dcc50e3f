import type { Kernel } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';

import type { IOperation } from './api';
import { onEnded } from './ended';
import { formatName } from './format';
import type { KernelStates } from './model';
import type { Notices } from './notices';
import { operationTexts } from './texts';

/**
 * What is no failure: the kernel is in use, or somebody wanted it otherwise, or
 * it is not known how it went, as the server was away.
 */
const EXPECTED = [
  'busy',
  'cancelled',
  'not_savable',
  'http_error',
  'no_extension',
  'unknown_operation',
  'unreachable'
];

/**
 * Tells that an idle kernel keeps its GPU because it could not be parked by
 * itself: once, until it is parked, however often the server tries.
 */
export class UnaskedParks {
  constructor(private readonly _options: UnaskedParks.IOptions) {
    const { kernels, model } = _options;
    model.operationStarted.connect((_, { done }) => {
      void done.then(final => this._ended(final));
    });
    const told = () => this._told;
    onEnded(kernels, told, kernelId => this._told.delete(kernelId));
  }

  private _ended(operation: IOperation): void {
    const { kind, cause, error, kernel_id, path, status } = operation;
    const { notices, trans } = this._options;
    if (kind !== 'park') {
      return;
    }
    if (status === 'done') {
      this._told.delete(kernel_id);
    }
    const isUnasked = cause === 'idle' && status === 'failed';
    if (!isUnasked || !error || EXPECTED.includes(error.reason)) {
      return;
    }
    if (!this._told.has(kernel_id)) {
      this._told.add(kernel_id);
      const name = path ? formatName(path, trans) : trans.__('An idle kernel');
      notices.quiet(operationTexts(kind, trans).failed, kernel_id, {
        ...error,
        message: trans.__('%1 keeps its GPU: %2', name, error.message)
      });
    }
  }

  private _told = new Set<string>();
}

export namespace UnaskedParks {
  export interface IOptions {
    kernels: Kernel.IManager;
    model: KernelStates;
    notices: Notices;
    trans: TranslationBundle;
  }
}
