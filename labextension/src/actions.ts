import type { ServiceManager } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';

import type { IOperation, IState, KernelStateAPI, OperationKind } from './api';
import {
  confirmCancel,
  confirmDelete,
  confirmRollback
} from './dialogs/confirm';
import { showDetails } from './dialogs/details';
import type { IRestoreChoice } from './dialogs/restore';
import { RestoreDialog } from './dialogs/restore';
import type { IFace } from './face';
import type { OperationFollower } from './follower';
import type { KernelStates } from './model';
import type { Notices } from './notices';
import { subject } from './notices';
import type { KernelPages } from './pages';
import { attachPages } from './pages';
import type { RequestError } from './request';
import { operationTexts } from './texts';

/** What a command acts on: a kernel, a notebook, or a kernel of a notebook. */
export interface ITarget {
  kernelId: string | null;
  path: string | null;
}

/** What the button and the commands do. */
export class Actions {
  constructor(private readonly _options: Actions.IOptions) {}

  /** What a click on the toolbar button does. */
  async click(kernelId: string | null, face: IFace): Promise<void> {
    const { model, trans } = this._options;
    if (face.error) {
      await showDetails(
        trans.__('Cannot Save Kernel State'),
        face.error,
        trans
      );
      return;
    }
    if (!kernelId) {
      return;
    }
    const { kernel, operation } = model.entry(kernelId);
    if (operation) {
      await this._offerCancel(operation);
    } else if (kernel?.execution_state === 'hibernated') {
      await this._run(
        trans.__('Waking the Kernel Failed'),
        subject('restore', kernelId),
        api => api.wake(kernelId)
      );
    } else if (kernel?.gpu_lost) {
      await (kernel.last_state
        ? this.restore({ kernelId, path: kernel.path })
        : showDetails(
            trans.__('GPU Lost'),
            {
              message: kernel.gpu_lost,
              reason: 'gpu_lost',
              hint: null,
              details: null
            },
            trans
          ));
    } else if (kernel?.parked) {
      await this.unpark(kernelId);
    } else if (kernel) {
      await this.save(kernelId);
    }
  }

  /** Save a kernel, and tell how that went. */
  async save(kernelId: string): Promise<void> {
    await this._do('save', kernelId, api => api.save(kernelId));
  }

  /** Save a kernel and end its process until it is needed. */
  async hibernate(kernelId: string): Promise<void> {
    await this._run(
      this._options.trans.__('Hibernating Failed'),
      subject('save', kernelId),
      api => api.hibernate(kernelId)
    );
  }

  /** Move a kernel's GPU memory to host memory until it is needed. */
  async park(kernelId: string): Promise<void> {
    await this._do('park', kernelId, api => api.park(kernelId));
  }

  /** Give a parked kernel its GPU back. */
  async unpark(kernelId: string): Promise<void> {
    await this._do('unpark', kernelId, api => api.unpark(kernelId));
  }

  /** Let the user choose a state and what to do with it. */
  async restore(target: ITarget): Promise<void> {
    const { model, notices, trans } = this._options;
    const states = () => this._states(target);
    const leave = (follower: OperationFollower) =>
      void notices.follow(follower);
    const options = { model, trans, states, leave };
    for (;;) {
      const choice = await RestoreDialog.show(options);
      if (choice?.action === 'delete') {
        // Dialogs do not stack: the list comes back after the question.
        await this._delete(choice.state);
        continue;
      }
      if (choice?.action === 'new') {
        await this._openAsNew(choice);
      } else if (choice && (await confirmRollback(choice.state, trans))) {
        await this._rollBack(choice);
      }
      return;
    }
  }

  /** Start an operation on a kernel and see it through. */
  private _do(
    kind: OperationKind,
    kernelId: string,
    start: (api: KernelStateAPI) => Promise<IOperation>
  ): Promise<IOperation | null> {
    const { failed } = operationTexts(kind, this._options.trans);
    return this._run(failed, subject(kind, kernelId), start);
  }

  private async _offerCancel(operation: IOperation): Promise<void> {
    const { model, notices, trans } = this._options;
    const { kind } = operation;
    if (kind === 'restore' || kind === 'verify') {
      return;
    }
    const { done } = model.follow(operation);
    if (await confirmCancel(kind, done, trans)) {
      await notices.cancel(operation);
    }
  }

  private async _rollBack({ gpuMap, state }: IRestoreChoice): Promise<void> {
    const { pages, serviceManager } = this._options;
    const operation = await this._do('restore', state.kernel_id, api =>
      api.restore(state.id, 'rollback', gpuMap)
    );
    if (operation?.result) {
      await attachPages(
        pages,
        serviceManager.sessions,
        operation.path ?? state.path,
        operation.result.kernel_id
      );
    }
  }

  private async _openAsNew({ gpuMap, state }: IRestoreChoice): Promise<void> {
    const { commands, serviceManager } = this._options;
    const operation = await this._do('restore', state.kernel_id, api =>
      api.restore(state.id, 'new', gpuMap)
    );
    if (operation?.result) {
      await serviceManager.kernels.refreshRunning();
      await commands.execute('notebook:create-new', {
        kernelId: operation.result.kernel_id,
        kernelName: state.kernel_name
      });
    }
  }

  private async _delete(state: IState): Promise<void> {
    const { api, model, notices, trans } = this._options;
    if (!(await confirmDelete(state, trans))) {
      return;
    }
    try {
      await api.deleteState(state.id);
    } catch (error) {
      notices.error(
        trans.__('Deleting the State Failed'),
        (error as RequestError).body
      );
    }
    await model.refresh(state.kernel_id);
  }

  /** The states of a notebook and of its present kernel, newest first. */
  private async _states(target: ITarget): Promise<IState[]> {
    const { api } = this._options;
    const lists = await Promise.all([
      target.kernelId ? api.states({ kernel: target.kernelId }) : [],
      target.path ? api.states({ path: target.path }) : []
    ]);
    const states = new Map(lists.flat().map(state => [state.id, state]));
    return [...states.values()].sort((a, b) =>
      b.created.localeCompare(a.created)
    );
  }

  /**
   * Start an operation and see it through.
   *
   * @param failure - the title of what is known where it could not be started
   * @param about - of what else is told of this only the last is of use
   * @returns the operation at its end, `null` where it could not be started
   */
  private async _run(
    failure: string,
    about: string,
    start: (api: KernelStateAPI) => Promise<IOperation>
  ): Promise<IOperation | null> {
    const { api, model, notices } = this._options;
    let operation: IOperation;
    try {
      operation = await start(api);
    } catch (error) {
      notices.error(failure, (error as RequestError).body, { about });
      return null;
    }
    return notices.follow(model.follow(operation));
  }
}

export namespace Actions {
  export interface IOptions {
    api: KernelStateAPI;
    commands: CommandRegistry;
    model: KernelStates;
    notices: Notices;
    pages: KernelPages;
    serviceManager: ServiceManager.IManager;
    trans: TranslationBundle;
  }
}
