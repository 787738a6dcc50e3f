import { Dialog } from '@jupyterlab/apputils';

import type { GpuMap, IState } from '../api';
import type { IErrorBody, RequestError } from '../request';
import { namedDialog } from './named';
import type { RestoreAction } from './restorebody';
import { BUTTONS, RestoreBody } from './restorebody';

export interface IRestoreChoice {
  action: RestoreAction;
  state: IState;
  /** The GPUs that are chosen for it. */
  gpuMap: GpuMap;
}

/** The dialog that lists the states of a notebook or kernel. */
export namespace RestoreDialog {
  export type IOptions = RestoreBody.IOptions;

  /**
   * Show the dialog.
   *
   * @param selected - the state to select first, the newest where `null`
   * @returns what the user chose, `null` for nothing
   */
  export async function show(
    options: IOptions,
    selected: string | null = null
  ): Promise<IRestoreChoice | null> {
    const { trans } = options;
    let states: IState[] | IErrorBody;
    try {
      states = await options.states();
    } catch (error) {
      states = (error as RequestError).body;
    }
    const some = Array.isArray(states) && states.length > 0;

    const body = new RestoreBody(options, states, selected);
    const dialog = namedDialog(trans.__('Restore Kernel State'), {
      body,
      // Those that need a state are hidden while there is none.
      buttons: [
        Dialog.createButton({
          label: trans.__('Delete'),
          caption: trans.__('Delete the selected state'),
          className: BUTTONS.delete,
          displayType: 'warn',
          accept: false,
          actions: ['delete']
        }),
        Dialog.cancelButton({ label: trans.__('Cancel') }),
        Dialog.createButton({
          label: trans.__('Open as New Kernel'),
          caption: trans.__(
            'Restore the selected state as a second kernel, in a new notebook'
          ),
          className: BUTTONS.new,
          accept: true,
          actions: ['new']
        }),
        Dialog.okButton({
          label: trans.__('Roll Back'),
          caption: trans.__(
            'Put the selected state in the place of the kernel'
          ),
          className: BUTTONS.rollback,
          actions: ['rollback']
        })
      ],
      defaultButton: some ? 3 : 1,
      focusNodeSelector: '[role="listbox"]'
    });
    body.accepted.connect(() => dialog.resolve());
    const result = await dialog.launch();

    const action = result.button.actions[0] as RestoreAction | undefined;
    const state = body.current;
    return action && state ? { action, state, gpuMap: body.gpuMap } : null;
  }
}
