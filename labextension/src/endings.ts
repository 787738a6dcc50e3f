import type { Notification } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';

import { detailsAction } from './dialogs/details';
import type { IServerEvent } from './events';
import { formatSeconds } from './format';
import type { KernelStates } from './model';
import { show } from './toasts';

/** Tells that the server is about to end, and what is saved before that. */
export class Endings {
  constructor(private readonly _options: Endings.IOptions) {
    _options.model.serverEvent.connect((_, event) => this._tell(event));
  }

  private _tell(event: IServerEvent): void {
    const { trans } = this._options;
    const details = detailsAction(
      trans.__('This Server Ends'),
      {
        message: event.why,
        reason: 'ends',
        hint: null,
        details: event.not_saved.join('\n') || null
      },
      trans
    );
    const isEarlyWord = event.action === 'ends';
    const missing = event.not_saved.length;
    this._show(
      event.ending_id,
      isEarlyWord ? this._ends(event) : this._saved(event),
      isEarlyWord || missing > 0 || event.not_uploaded > 0
        ? 'warning'
        : 'success',
      [details]
    );
  }

  private _ends({ seconds, sure }: IServerEvent): string {
    const { trans } = this._options;
    const left = formatSeconds(seconds ?? 0);
    return sure
      ? trans.__('This server ends in %1: kernels are saved.', left)
      : trans.__('This server may end in %1: kernels are saved.', left);
  }

  private _saved(event: IServerEvent): string {
    const { trans } = this._options;
    const { sure } = event;
    const missing = event.not_saved.length;
    if (missing > 0) {
      return sure
        ? trans._n(
            'This server ends, and one kernel could not be saved.',
            'This server ends, and %1 kernels could not be saved.',
            missing
          )
        : trans._n(
            'This server may end, and one kernel could not be saved.',
            'This server may end, and %1 kernels could not be saved.',
            missing
          );
    }
    if (event.not_uploaded > 0) {
      return sure
        ? trans.__('This server ends. Kernels are saved, on this node only.')
        : trans.__(
            'This server may end. Kernels are saved, on this node only.'
          );
    }
    return sure
      ? trans.__('This server ends. Kernels are saved.')
      : trans.__('This server may end. Kernels are saved.');
  }

  private _show(
    ending: string,
    message: string,
    type: 'warning' | 'success',
    actions: Notification.IAction[]
  ): void {
    const id = this._shown.get(ending);
    const options = { autoClose: false as const, actions };
    this._shown.set(ending, show(id, message, type, options));
  }

  private _shown = new Map<string, string>();
}

export namespace Endings {
  export interface IOptions {
    model: KernelStates;
    trans: TranslationBundle;
  }
}
