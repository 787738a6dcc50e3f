import { Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { ISavedGpus, IState } from '../api';
import { formatAge, formatSize } from '../format';
import type { IErrorBody } from '../request';
import { closedLine } from './outside';

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

/** What a state has of GPUs, in a user's words. */
export function gpuText(
  { gpus, memory }: ISavedGpus,
  trans: TranslationBundle
): string {
  const counts = new Map<string, number>();
  for (const { name, used } of gpus) {
    if (used) {
      counts.set(name, (counts.get(name) ?? 0) + 1);
    }
  }
  const names = [...counts].map(([name, count]) =>
    count > 1 ? trans.__('%1 × %2', count, name) : name
  );
  return names.length > 0
    ? trans.__('%1 on %2', formatSize(memory), names.join(', '))
    : trans.__('%1 of GPU memory', formatSize(memory));
}

/** The newest state that is older than this one and not known to be damaged. */
export function olderState(states: IState[], state: IState): IState | null {
  const index = states.findIndex(other => other.id === state.id);
  const later = states.slice(index + 1);
  return later.find(other => other.damage === null) ?? null;
}

interface IListProps {
  states: IState[];
  selected: string;
  onSelect: (stateId: string) => void;
  onAccept: () => void;
  trans: TranslationBundle;
}

/** The states to choose from, newest first. */
export function StateList(props: IListProps): JSX.Element {
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

/** What is known of a state, and what stands in the way of restoring it. */
export function StateFacts(props: IFactsProps): JSX.Element {
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
  if (state.gpu) {
    facts.push(gpuText(state.gpu, trans));
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

/** Why something could not be done. */
export function ErrorText(props: { error: IErrorBody }): JSX.Element {
  const { message, hint } = props.error;
  return (
    <div className="jp-gpu-ckpt-error jp-mod-error" role="alert">
      <p>{message}</p>
      {hint && <p>{hint}</p>}
    </div>
  );
}
