import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { IState, IVerification } from '../api';
import { formatAge, formatPercent, formatSize } from '../format';
import type { IErrorBody } from '../request';
import { errorLine } from '../texts';
import { kindText } from './contents';

/** So many things that are lost are named. */
const NAMED = 8;

/** A check of a state, as the page knows it. */
export interface ICheck {
  /** From 0 to 1; `null` when it has ended. */
  progress: number | null;
  /** What it found. */
  found: IVerification | null;
  /** Why it did not come to an end. */
  error: IErrorBody | null;
}

/** What is lost of a state, in a user's words, the most first. */
export function lostTexts(
  found: IVerification,
  trans: TranslationBundle
): string[] {
  const items = [...found.items].sort((a, b) => b.size - a.size);
  const named = items
    .slice(0, NAMED)
    .map(({ kind, name, size }) =>
      trans.__('%1 %2: %3', kindText(kind, trans), name, formatSize(size))
    );
  const more = items.length - named.length;
  return more > 0 ? [...named, trans.__('and %1 more', more)] : named;
}

/** What a check found, in a sentence. */
export function foundText(
  found: IVerification,
  trans: TranslationBundle
): string {
  return found.intact
    ? trans.__('The state is whole: all of it was read back.')
    : trans.__('%1 of the state cannot be read back.', formatSize(found.lost));
}

/** What is known of whether a state can be read back. */
export function checkText(
  state: IState,
  check: ICheck | null,
  trans: TranslationBundle
): string {
  if (check && check.progress !== null) {
    return trans.__('Verifying…');
  }
  if (check?.found) {
    return foundText(check.found, trans);
  }
  if (state.damage !== null) {
    return trans.__('Known to be damaged.');
  }
  return state.verified
    ? trans.__('Verified %1: it was whole.', formatAge(state.verified, trans))
    : trans.__('Not verified since it was saved.');
}

interface ICheckProps {
  state: IState;
  /** The check of it that runs or ran since the dialog was opened. */
  check: ICheck | null;
  /** The state that the check found whole instead. */
  older: IState | null;
  onCheck: () => void;
  onStop: () => void;
  trans: TranslationBundle;
}

/** Whether a state can be read back: what is known of that, and a button to find out. */
export function StateCheck(props: ICheckProps): JSX.Element {
  const { state, check, older, onCheck, onStop, trans } = props;
  const progress = check?.progress ?? null;
  const isRunning = progress !== null;
  const found = check?.found ?? null;
  return (
    <div className="jp-gpu-ckpt-check">
      <div className="jp-gpu-ckpt-check-row">
        <span role="status" className="jp-gpu-ckpt-check-text">
          {checkText(state, check, trans)}
        </span>
        {isRunning && (
          <progress
            value={progress}
            aria-label={trans.__('Verifying')}
            title={formatPercent(progress)}
          />
        )}
        <button
          className="jp-mod-styled jp-mod-reject jp-gpu-ckpt-verify"
          title={
            isRunning
              ? undefined
              : trans.__('Read all of the state back, without restoring it')
          }
          onClick={isRunning ? onStop : onCheck}
        >
          {isRunning ? trans.__('Stop') : trans.__('Verify')}
        </button>
      </div>
      {check?.error && (
        // Not of the class that disables the buttons: it may be whole.
        <p role="alert" className="jp-gpu-ckpt-error">
          {errorLine(check.error)}
        </p>
      )}
      {found && !found.intact && (
        <>
          {found.items.length > 0 && (
            <ul aria-label={trans.__('What is lost')}>
              {lostTexts(found, trans).map((line, key) => (
                <li key={key}>{line}</li>
              ))}
            </ul>
          )}
          <p>
            {older
              ? trans.__(
                  'The state saved %1 was read back too, and is whole.',
                  formatAge(older.created, trans)
                )
              : trans.__('No older state of this kernel is whole.')}
          </p>
        </>
      )}
    </div>
  );
}
