import { Dialog } from '@jupyterlab/apputils';
import { Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';
import * as React from 'react';

import type { IState, KernelStateAPI, RestoreMode } from '../api';
import { explain } from '../face';
import { formatAge, formatSize } from '../format';
import type { IErrorBody } from '../request';
import type { RequestError } from '../request';
import { CheckedBody } from './checked';
import { StateContents } from './contents';
import { namedDialog } from './named';
import { StateOutside, closedLine } from './outside';

/** What the user chose to do with a state. */
export type RestoreAction = 'rollback' | 'new' | 'delete';

export interface IRestoreChoice {
  action: RestoreAction;
  state: IState;
}

/** The classes of the buttons that restore. */
const BUTTONS: Record<RestoreMode, string> = {
  rollback: 'jp-gpu-ckpt-rollback',
  new: 'jp-gpu-ckpt-open-new'
};

/** Why a state was saved, in a user's words. */
export function reasonText(state: IState, trans: TranslationBundle): string {
  if (state.label) {
    return state.label;
  }
  switch (state.reason) {
    case 'user':
      return trans.__('Saved by you');
    case 'idle':
      return trans.__('Saved while idle');
    case 'interval':
      return trans.__('Saved automatically');
    case 'long_cell':
      return trans.__('Saved after a long cell');
    case 'shutdown':
      return trans.__('Saved at shutdown');
    case 'preemption':
      return trans.__('Saved before its server was taken away');
    case 'cull':
      return trans.__('Saved before it was ended for being idle');
    case 'hibernate':
      return trans.__('Saved to hibernate');
    default:
      return state.reason;
  }
}

/** What is special about a state, in a user's words. */
export function stateMarks(state: IState, trans: TranslationBundle): string[] {
  const marks: [boolean, string][] = [
    [state.damage !== null && !state.kernel_name, trans.__('unreadable')],
    [state.damage !== null && !!state.kernel_name, trans.__('damaged')],
    [state.pinned, trans.__('pinned')],
    [!state.durable, trans.__('local only')],
    [state.encrypted, trans.__('encrypted')]
  ];
  return marks.filter(([is]) => is).map(([, word]) => word);
}

/** The newest state that is older than this one and not known to be damaged. */
export function olderState(states: IState[], state: IState): IState | null {
  const later = states.slice(states.indexOf(state) + 1);
  return later.find(other => other.damage === null) ?? null;
}

interface IListProps {
  states: IState[];
  selected: string;
  onSelect: (stateId: string) => void;
  onAccept: () => void;
  trans: TranslationBundle;
}

function StateList(props: IListProps): JSX.Element {
  const { states, selected, onSelect, onAccept, trans } = props;
  const ref = React.useRef<HTMLUListElement>(null);
  const index = states.findIndex(state => state.id === selected);

  React.useEffect(() => {
    ref.current
      ?.querySelector('[aria-selected="true"]')
      ?.scrollIntoView({ block: 'nearest' });
  }, [selected]);

  const onKeyDown = (event: React.KeyboardEvent) => {
    const last = states.length - 1;
    const target: Record<string, number> = {
      ArrowDown: Math.min(index + 1, last),
      ArrowUp: Math.max(index - 1, 0),
      Home: 0,
      End: last
    };
    if (event.key in target) {
      event.preventDefault();
      onSelect(states[target[event.key]].id);
    } else if (event.key === 'Enter') {
      event.preventDefault();
      onAccept();
    }
  };

  return (
    <ul
      ref={ref}
      className="jp-gpu-ckpt-list"
      role="listbox"
      tabIndex={0}
      aria-label={trans.__('Saved states')}
      aria-activedescendant={`jp-gpu-ckpt-state-${selected}`}
      onKeyDown={onKeyDown}
    >
      {states.map(state => (
        <li
          key={state.id}
          id={`jp-gpu-ckpt-state-${state.id}`}
          className="jp-gpu-ckpt-item"
          role="option"
          aria-selected={state.id === selected}
          data-state-id={state.id}
          onClick={() => onSelect(state.id)}
        >
          <span
            className="jp-gpu-ckpt-item-title"
            title={Time.format(state.created)}
          >
            {formatAge(state.created, trans)}
          </span>
          <span className="jp-gpu-ckpt-item-side">
            {formatSize(state.size)}
          </span>
          <span className="jp-gpu-ckpt-item-detail">
            {[reasonText(state, trans), ...stateMarks(state, trans)].join(
              ' · '
            )}
          </span>
          <span className="jp-gpu-ckpt-item-side">{state.node.hostname}</span>
        </li>
      ))}
    </ul>
  );
}

interface IFactsProps {
  state: IState;
  error: IErrorBody | null;
  /** A whole state to restore instead of a damaged one. */
  older: IState | null;
  onSelect: (stateId: string) => void;
  trans: TranslationBundle;
}

function StateFacts(props: IFactsProps): JSX.Element {
  const { state, error, older, onSelect, trans } = props;
  const blocking = state.differences.filter(item => item.blocking);
  const harmless = state.differences.filter(item => !item.blocking);
  const facts = [Time.format(state.created), state.display_name];
  if (state.execution_count !== null) {
    facts.push(trans.__('execution count %1', state.execution_count));
  }
  if (state.execution_state === 'busy') {
    facts.push(trans.__('a cell was running'));
  }
  if (state.cost !== null) {
    facts.push(trans.__('deleting it frees %1', formatSize(state.cost)));
  }
  const closed = closedLine(state.outside, trans);
  return (
    <div className="jp-gpu-ckpt-facts" role="status" aria-live="polite">
      <p>{facts.join(' · ')}</p>
      {closed && <p className="jp-gpu-ckpt-closed">{closed}</p>}
      {error && <ErrorText error={error} />}
      {!error && state.restorable === null && (
        <p>{trans.__('Looking whether it can be restored here…')}</p>
      )}
      {blocking.length > 0 && (
        // The class makes the dialog disable its accepting buttons.
        <div
          className={`jp-gpu-ckpt-differences ${state.restorable ? '' : 'jp-mod-error'}`}
        >
          <p>{obstacleText(state, trans)}</p>
          <ul>
            {blocking.map((item, key) => (
              <li key={key}>{item.message}</li>
            ))}
          </ul>
        </div>
      )}
      {state.damage !== null && older && (
        <p>
          <button
            className="jp-mod-styled jp-mod-reject jp-gpu-ckpt-older"
            onClick={() => onSelect(older.id)}
          >
            {trans.__('Select the Last Whole State')}
          </button>
        </p>
      )}
      {(harmless.length > 0 || state.warnings.length > 0) && (
        <ul className="jp-gpu-ckpt-warnings">
          {[...harmless.map(item => item.message), ...state.warnings].map(
            (message, key) => (
              <li key={key}>{message}</li>
            )
          )}
        </ul>
      )}
    </div>
  );
}

/** What it is that the blocking differences stand in the way of. */
export function obstacleText(state: IState, trans: TranslationBundle): string {
  switch (state.modes?.[0]) {
    case 'new':
      return trans.__('This state can only be opened as a new kernel:');
    case 'rollback':
      return trans.__('This state cannot be opened as a new kernel here:');
    default:
      return trans.__('This state cannot be restored here:');
  }
}

function ErrorText(props: { error: IErrorBody }): JSX.Element {
  const { message, hint } = props.error;
  return (
    <div className="jp-gpu-ckpt-error jp-mod-error" role="alert">
      <p>{message}</p>
      {hint && <p>{hint}</p>}
    </div>
  );
}

/** The dialog's body: the states, and what is known of the selected one. */
class RestoreBody extends CheckedBody {
  constructor(
    private readonly _options: RestoreDialog.IOptions,
    private readonly _states: IState[] | IErrorBody,
    selected: string | null
  ) {
    super();
    this.addClass('jp-gpu-ckpt-RestoreBody');
    if (Array.isArray(_states) && _states.length > 0) {
      const known = _states.some(state => state.id === selected);
      const whole = _states.find(state => state.damage === null);
      this._select(known ? selected! : (whole ?? _states[0]).id);
    }
  }

  /** Emitted when the selected state is accepted with the keyboard. */
  get accepted(): ISignal<this, void> {
    return this._accepted;
  }

  /** The state that is selected, with all that was found out about it. */
  get current(): IState | null {
    const listed = this._listed(this._selected);
    const checked = this._checked.get(this._selected);
    // Only the list knows what deleting it would free.
    return checked && listed
      ? { ...checked, cost: listed.cost, pinned: listed.pinned }
      : (checked ?? listed);
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
          older={olderState(states, this._listed(state.id) ?? state)}
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
            <StateOutside
              key={state.id}
              outside={state.outside}
              trans={trans}
            />
            <StateContents
              stateId={state.id}
              api={this._options.api}
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
    if (this._checked.has(id)) {
      return;
    }
    this._options.api
      .state(id)
      .then(state => this._checked.set(id, state))
      .catch((error: RequestError) => {
        this._errors.set(id, explain(error.body, this._options.trans));
      })
      .finally(() => this._changed());
  }

  private async _pin(state: IState, pinned: boolean): Promise<void> {
    const listed = this._listed(state.id);
    if (!listed) {
      return;
    }
    // At once, and back again where the server refuses.
    listed.pinned = pinned;
    this._changed();
    try {
      await this._options.api.pin(state.id, pinned);
      this._errors.delete(state.id);
    } catch (error) {
      listed.pinned = !pinned;
      this._errors.set(
        state.id,
        explain((error as RequestError).body, this._options.trans)
      );
    }
    this._changed();
  }

  protected override onChecked(): void {
    const dialog = this.node.closest('.jp-Dialog');
    for (const [mode, className] of Object.entries(BUTTONS)) {
      const button = dialog?.querySelector<HTMLButtonElement>(`.${className}`);
      if (button && !this._offers(mode as RestoreMode)) {
        button.disabled = true;
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
  private _errors = new Map<string, IErrorBody>();
  private _selected = '';
}

/** The dialog that lists the states of a notebook or kernel. */
export namespace RestoreDialog {
  export interface IOptions {
    api: KernelStateAPI;
    trans: TranslationBundle;
    /** Read the states to list; may reject with a RequestError. */
    states: () => Promise<IState[]>;
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
      buttons: some
        ? [
            Dialog.createButton({
              label: trans.__('Delete'),
              caption: trans.__('Delete the selected state'),
              className: 'jp-gpu-ckpt-delete',
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
          ]
        : [Dialog.cancelButton({ label: trans.__('Close') })],
      focusNodeSelector: '[role="listbox"]'
    });
    body.accepted.connect(() => dialog.resolve());
    const result = await dialog.launch();

    const action = result.button.actions[0] as RestoreAction | undefined;
    const state = body.current;
    return action && state ? { action, state } : null;
  }
}
