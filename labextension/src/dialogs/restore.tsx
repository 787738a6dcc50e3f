import { Dialog } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import * as React from 'react';

import type { IOperation, IState, RestoreMode } from '../api';
import { explain } from '../face';
import type { OperationFollower } from '../follower';
import type { KernelStates } from '../model';
import type { IErrorBody, RequestError } from '../request';
import type { ICheck } from './check';
import { StateCheck } from './check';
import { CheckedBody } from './checked';
import { StateContents } from './contents';
import { namedDialog } from './named';
import { StateOutside } from './outside';
import { ErrorText, StateFacts, StateList, olderState } from './states';

/** What the user chose to do with a state. */
export type RestoreAction = 'rollback' | 'new' | 'delete';

export interface IRestoreChoice {
  action: RestoreAction;
  state: IState;
}

/** The classes of the buttons that need a state. */
const BUTTONS: Record<RestoreAction, string> = {
  delete: 'jp-gpu-ckpt-delete',
  rollback: 'jp-gpu-ckpt-rollback',
  new: 'jp-gpu-ckpt-open-new'
};

/** The dialog's body: the states, and what is known of the selected one. */
class RestoreBody extends CheckedBody {
  constructor(
    private readonly _options: RestoreDialog.IOptions,
    private _states: IState[] | IErrorBody,
    selected: string | null
  ) {
    super();
    this.addClass('jp-gpu-ckpt-RestoreBody');
    if (selected !== null && this._listed(selected)) {
      this._select(selected);
    } else {
      this._selectNewest();
    }
    // Disconnected when the dialog is disposed of.
    _options.model.statesChanged.connect(this._onStatesChanged, this);
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    super.dispose();
    // What has not ended is told outside of the dialog.
    [...this._followers.values()].forEach(this._options.leave);
  }

  /** Emitted when the selected state is accepted with the keyboard. */
  get accepted(): ISignal<this, void> {
    return this._accepted;
  }

  /** The state that is selected, with all that was found out about it. */
  get current(): IState | null {
    const listed = this._listed(this._selected);
    const checked = this._checked.get(this._selected);
    if (!checked || !listed) {
      return listed;
    }
    // The list is read anew, and only it knows what deleting would free.
    const { cost, damage, durable, label, pinned, verified } = listed;
    return { ...checked, cost, damage, durable, label, pinned, verified };
  }

  private _listed(id: string): IState | null {
    return Array.isArray(this._states)
      ? (this._states.find(state => state.id === id) ?? null)
      : null;
  }

  protected override render(): JSX.Element {
    const { trans } = this._options;
    const states = this._states;
    if (!Array.isArray(states)) {
      return <ErrorText error={explain(states, trans)} />;
    }
    const state = this.current;
    if (!state) {
      return (
        <div className="jp-gpu-ckpt-empty jp-mod-error">
          <p>{trans.__('No saved state yet.')}</p>
          <p>
            {trans.__(
              'Save one with “Save Kernel State” in the Kernel menu or with the button in the notebook’s toolbar.'
            )}
          </p>
        </div>
      );
    }
    const check = this._checks.get(state.id) ?? null;
    const found = check?.found ?? null;
    const older =
      found && !found.intact
        ? this._listed(found.older ?? '')
        : olderState(states, state);
    return (
      <>
        <StateList
          states={states}
          selected={state.id}
          onSelect={id => this._select(id)}
          onAccept={() => this._accept()}
          trans={trans}
        />
        <StateFacts
          state={state}
          error={this._errors.get(state.id) ?? null}
          older={older}
          onSelect={id => this._select(id)}
          trans={trans}
        />
        {state.kernel_name !== '' && (
          <>
            <label className="jp-gpu-ckpt-pin">
              <input
                type="checkbox"
                className="jp-gpu-ckpt-pin-box"
                checked={state.pinned}
                onChange={event => void this._pin(state, event.target.checked)}
              />
              {trans.__('Pinned: kept until it is deleted by hand')}
            </label>
            <StateCheck
              state={state}
              check={check}
              older={older}
              onCheck={() => void this._check(state.id)}
              onStop={() => void this._stop(state.id)}
              trans={trans}
            />
            <StateOutside
              key={state.id}
              outside={state.outside}
              trans={trans}
            />
            <StateContents
              stateId={state.id}
              api={this._options.model.api}
              trans={trans}
            />
          </>
        )}
      </>
    );
  }

  private _select(id: string): void {
    this._selected = id;
    this._changed();
    if (!this._checked.has(id)) {
      void this._read(id);
    }
  }

  /** Select the newest state that is not known to be damaged. */
  private _selectNewest(): void {
    const states = Array.isArray(this._states) ? this._states : [];
    const state = states.find(({ damage }) => damage === null) ?? states[0];
    if (state) {
      this._select(state.id);
    }
  }

  /** Find out whether a state can be restored here. */
  private async _read(id: string): Promise<void> {
    const { model, trans } = this._options;
    try {
      this._checked.set(id, await model.api.state(id));
      this._errors.delete(id);
    } catch (error) {
      this._errors.set(id, explain((error as RequestError).body, trans));
    }
    this._changed();
  }

  /** Read the list anew; once more where something changed meanwhile. */
  private async _onStatesChanged(): Promise<void> {
    this._isStale = true;
    if (this._isReading) {
      return;
    }
    this._isReading = true;
    while (this._isStale && !this.isDisposed) {
      this._isStale = false;
      try {
        this._take(await this._options.states());
      } catch {
        // The server is away: what is shown may still be right.
      }
    }
    this._isReading = false;
  }

  private _take(states: IState[]): void {
    const before = this._listed(this._selected);
    this._states = states;
    const now = this._listed(this._selected);
    if (!now) {
      this._selectNewest();
    } else if (before && before.damage !== now.damage) {
      void this._read(now.id);
    }
    this._changed();
  }

  /** Read all of a state back, here and on. */
  private async _check(id: string): Promise<void> {
    const { model, trans } = this._options;
    const tell = (change: Partial<ICheck>) => {
      const check = { progress: null, found: null, error: null, ...change };
      this._checks.set(id, check);
      this._changed();
    };
    tell({ progress: 0 });
    let final: IOperation;
    try {
      const follower = model.follow(await model.api.verify(id));
      if (this.isDisposed) {
        this._options.leave(follower);
        return;
      }
      this._followers.set(id, follower);
      follower.changed.connect((_, { progress }) => tell({ progress }));
      final = await follower.done;
      this._followers.delete(id);
    } catch (error) {
      tell({ error: explain((error as RequestError).body, trans) });
      return;
    }
    const { status, result, error } = final;
    tell({
      found: result?.verification ?? null,
      error: error && status === 'failed' ? explain(error, trans) : null
    });
  }

  private async _stop(id: string): Promise<void> {
    const follower = this._followers.get(id);
    try {
      if (follower) {
        await this._options.model.api.cancel(follower.operation.id);
      }
    } catch {
      // It has ended by itself, which its follower tells.
    }
  }

  private async _pin(state: IState, pinned: boolean): Promise<void> {
    const show = (value: boolean) => {
      const listed = this._listed(state.id);
      if (listed) {
        listed.pinned = value;
      }
      this._changed();
    };
    // At once, and back again where the server refuses.
    show(pinned);
    try {
      await this._options.model.api.pin(state.id, pinned);
      this._errors.delete(state.id);
    } catch (error) {
      show(!pinned);
      this._errors.set(
        state.id,
        explain((error as RequestError).body, this._options.trans)
      );
    }
    this._changed();
  }

  protected override onChecked(): void {
    const dialog = this.node.closest('.jp-Dialog');
    const none = this.current === null;
    for (const [action, className] of Object.entries(BUTTONS)) {
      const button = dialog?.querySelector<HTMLButtonElement>(`.${className}`);
      if (button) {
        button.hidden = none;
        // The dialog itself disables those that accept.
        button.disabled =
          action === 'delete'
            ? none
            : button.disabled || !this._offers(action as RestoreMode);
      }
    }
  }

  /** Whether nothing is known to stand in the way of restoring the state so. */
  private _offers(mode: RestoreMode): boolean {
    const modes = this.current?.modes;
    return !modes || modes.includes(mode);
  }

  private _accept(): void {
    // The dialog would also accept what its buttons do not offer.
    if (!this.node.querySelector('.jp-mod-error') && this._offers('rollback')) {
      this._accepted.emit();
    }
  }

  private _changed(): void {
    if (this.isDisposed) {
      return;
    }
    this.update();
  }

  private _accepted = new Signal<this, void>(this);
  private _checked = new Map<string, IState>();
  private _checks = new Map<string, ICheck>();
  private _errors = new Map<string, IErrorBody>();
  /** Of the checks that go on. */
  private _followers = new Map<string, OperationFollower>();
  private _isReading = false;
  private _isStale = false;
  private _selected = '';
}

/** The dialog that lists the states of a notebook or kernel. */
export namespace RestoreDialog {
  export interface IOptions {
    model: KernelStates;
    trans: TranslationBundle;
    /** Read the states to list; may reject with a RequestError. */
    states: () => Promise<IState[]>;
    /** Take over what goes on when the dialog is closed. */
    leave: (follower: OperationFollower) => void;
  }

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
    return action && state ? { action, state } : null;
  }
}
