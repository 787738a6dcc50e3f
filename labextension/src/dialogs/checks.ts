import type { TranslationBundle } from '@jupyterlab/translation';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { IOperation } from '../api';
import { explain } from '../face';
import type { OperationFollower } from '../follower';
import type { KernelStates } from '../model';
import type { RequestError } from '../request';
import type { ICheck } from './check';

/** The checks of states that a dialog asked for. */
export class StateChecks {
  constructor(private readonly _options: StateChecks.IOptions) {}

  /** Emitted when a check moved on or ended. */
  get changed(): ISignal<this, void> {
    return this._changed;
  }

  /** What goes on is told outside of the dialog from here on. */
  dispose(): void {
    this._isDisposed = true;
    [...this._followers.values()].forEach(this._options.leave);
    Signal.clearData(this);
  }

  /** What is known of a state's check, `null` where there was none. */
  of(id: string): ICheck | null {
    return this._checks.get(id) ?? null;
  }

  /** Read all of a state back, here and on. */
  async check(id: string): Promise<void> {
    const { model, trans } = this._options;
    const tell = (change: Partial<ICheck>) => {
      const check = { progress: null, found: null, error: null, ...change };
      this._checks.set(id, check);
      this._changed.emit();
    };
    tell({ progress: 0 });
    let final: IOperation;
    try {
      const follower = model.follow(await model.api.verify(id));
      if (this._isDisposed) {
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

  async stop(id: string): Promise<void> {
    const follower = this._followers.get(id);
    try {
      if (follower) {
        await this._options.model.api.cancel(follower.operation.id);
      }
    } catch {
      // It has ended by itself, which its follower tells.
    }
  }

  private _changed = new Signal<this, void>(this);
  private _checks = new Map<string, ICheck>();
  /** Of the checks that go on. */
  private _followers = new Map<string, OperationFollower>();
  private _isDisposed = false;
}

export namespace StateChecks {
  export interface IOptions {
    model: KernelStates;
    trans: TranslationBundle;
    /** Take over a check that goes on. */
    leave: (follower: OperationFollower) => void;
  }
}
