import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import * as React from 'react';

import type { GpuMap, IState, RestoreMode } from '../api';
import { explain } from '../face';
import type { OperationFollower } from '../follower';
import type { KernelStates } from '../model';
import type { IErrorBody, RequestError } from '../request';
import { StateCheck } from './check';
import { CheckedBody } from './checked';
import { StateChecks } from './checks';
import { StateContents } from './contents';
import { StateGpus } from './gpus';
import { StateOutside } from './outside';
import { ErrorText, StateFacts, StateList, olderState } from './states';

/** What the user chose to do with a state. */
export type RestoreAction = 'rollback' | 'new' | 'delete';

/** The classes of the buttons that need a state. */
export const BUTTONS: Record<RestoreAction, string> = {
  delete: 'jp-gpu-ckpt-delete',
  rollback: 'jp-gpu-ckpt-rollback',
  new: 'jp-gpu-ckpt-open-new'
};

/** The dialog's body: the states, and what is known of the selected one. */
export class RestoreBody extends CheckedBody {
  constructor(
    private readonly _options: RestoreBody.IOptions,
    private _states: IState[] | IErrorBody,
    selected: string | null
  ) {
    super();
    this.addClass('jp-gpu-ckpt-RestoreBody');
    this._checks = new StateChecks(_options);
    this._checks.changed.connect(() => this._changed());
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
    this._checks.dispose();
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

  /** The GPUs that are chosen for the selected state. */
  get gpuMap(): GpuMap {
    return this._gpuMaps.get(this._selected) ?? {};
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
    const check = this._checks.of(state.id);
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
            <StateGpus
              gpu={state.gpu}
              chosen={this.gpuMap}
              onChoose={chosen => {
                this._gpuMaps.set(state.id, chosen);
                this._changed();
              }}
              trans={trans}
            />
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
              onCheck={() => void this._checks.check(state.id)}
              onStop={() => void this._checks.stop(state.id)}
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
  private _checks: StateChecks;
  private _errors = new Map<string, IErrorBody>();
  private _gpuMaps = new Map<string, GpuMap>();
  private _isReading = false;
  private _isStale = false;
  private _selected = '';
}

export namespace RestoreBody {
  export interface IOptions {
    model: KernelStates;
    trans: TranslationBundle;
    /** Read the states to list; may reject with a RequestError. */
    states: () => Promise<IState[]>;
    /** Take over what goes on when the dialog is closed. */
    leave: (follower: OperationFollower) => void;
  }
}
