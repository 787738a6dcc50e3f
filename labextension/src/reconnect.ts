import type { ServiceManager } from '@jupyterlab/services';
import { Poll } from '@lumino/polling';
import type { ISignal } from '@lumino/signaling';
import { Signal } from '@lumino/signaling';

import type { KernelPages } from './pages';

/** First and longest wait, in milliseconds, before the server is asked again. */
const FREQUENCY = { interval: 2000, backoff: true, max: 30_000 };

/**
 * Notices that the server is back after it was away.
 *
 * JupyterLab says when a connection is lost, but not when the server is back,
 * which may be a new one with other kernels. Only between the two is the
 * server polled.
 */
export class ReconnectWatcher {
  /**
   * @param ping - resolves when the server answers
   */
  constructor(
    serviceManager: ServiceManager.IManager,
    pages: KernelPages,
    ping: () => Promise<unknown>
  ) {
    this._poll = new Poll({
      auto: false,
      factory: ping,
      frequency: FREQUENCY,
      name: 'jupyter-gpu-ckpt:reconnect',
      standby: 'when-hidden'
    });
    this._poll.ticked.connect((poll, state) => {
      if (state.phase === 'resolved' && this._away) {
        this._away = false;
        void poll.stop();
        this._reconnected.emit();
      }
    });
    serviceManager.connectionFailure.connect(() => this._onLost());
    pages.forEachContext(context => {
      let connected = false;
      context.connectionStatusChanged.connect((_, status) => {
        if (connected && status !== 'connected') {
          this._onLost();
        }
        connected = status === 'connected';
      });
    });
  }

  /** Emitted when the server answers again. */
  get reconnected(): ISignal<this, void> {
    return this._reconnected;
  }

  private _onLost(): void {
    if (!this._away) {
      this._away = true;
      void this._poll.start();
    }
  }

  private _away = false;
  private _poll: Poll;
  private _reconnected = new Signal<this, void>(this);
}
