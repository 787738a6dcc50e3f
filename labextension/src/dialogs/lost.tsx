import { Dialog } from '@jupyterlab/apputils';
import { Time } from '@jupyterlab/coreutils';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import type { GpuMap, ILostKernel, ISavedGpus, IState } from '../api';
import { formatAge, formatName, formatSize } from '../format';
import { CheckedBody } from './checked';
import { StateGpus } from './gpus';
import { namedDialog } from './named';
import type { IOutsideProps } from './outside';
import { StateOutside, closedLine, hasOutside } from './outside';
import { reasonText } from './states';

export interface ILostChoice {
  action: 'restore' | 'dismiss';
  kernels: ILostKernel[];
  /** The GPUs that are chosen, by kernel. */
  gpuMaps: ReadonlyMap<string, GpuMap>;
}

/** The class of the button that needs a kernel and accepts nothing. */
const DISMISS_CLASS = 'jp-gpu-ckpt-dismiss-lost';

/** Reads a state with the GPUs that can stand for its own; may reject. */
type ReadState = (stateId: string) => Promise<IState>;

class LostBody extends CheckedBody {
  constructor(
    private readonly _kernels: ILostKernel[],
    read: ReadState,
    private readonly _trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-gpu-ckpt-LostBody');
    this._checked = new Set(_kernels.map(kernel => kernel.kernel_id));
    for (const { kernel_id, state } of _kernels) {
      if (state.gpu) {
        void this._readGpus(kernel_id, () => read(state.id));
      }
    }
  }

  /** The GPUs that are chosen, by kernel. */
  readonly gpuMaps = new Map<string, GpuMap>();

  /** Lists do not say which GPUs can stand for a state's. */
  private async _readGpus(
    kernelId: string,
    read: () => Promise<IState>
  ): Promise<void> {
    try {
      const { gpu } = await read();
      if (gpu && !this.isDisposed) {
        this._gpus.set(kernelId, gpu);
        this.update();
      }
    } catch {
      // It can be restored without a choice, and says itself what is wrong.
    }
  }

  get selected(): ILostKernel[] {
    return this._kernels.filter(kernel => this._checked.has(kernel.kernel_id));
  }

  protected override render(): JSX.Element {
    const trans = this._trans;
    return (
      <>
        <p>
          {trans._n(
            'This kernel ended with its server or node. Its last saved state can be restored.',
            'These kernels ended with their server or node. Their last saved states can be restored.',
            this._kernels.length
          )}
        </p>
        <ul className="jp-gpu-ckpt-list" aria-label={trans.__('Lost kernels')}>
          {this._kernels.map(kernel => this._item(kernel))}
        </ul>
        {this._checked.size === 0 && (
          // The class makes the dialog disable its accepting buttons.
          <p role="alert" className="jp-mod-error jp-gpu-ckpt-none-selected">
            {trans.__('No kernel is selected.')}
          </p>
        )}
      </>
    );
  }

  protected override onChecked(): void {
    // The dialog itself disables those that accept.
    const dismiss = this.node
      .closest('.jp-Dialog')
      ?.querySelector<HTMLButtonElement>(`.${DISMISS_CLASS}`);
    if (dismiss) {
      dismiss.disabled = this._checked.size === 0;
    }
  }

  private _item(kernel: ILostKernel): JSX.Element {
    const trans = this._trans;
    const { kernel_id, path, state } = kernel;
    const toggle = (event: React.ChangeEvent<HTMLInputElement>) => {
      if (event.target.checked) {
        this._checked.add(kernel_id);
      } else {
        this._checked.delete(kernel_id);
      }
      this.update();
    };
    return (
      <li key={kernel_id} data-kernel-id={kernel_id}>
        <label className="jp-gpu-ckpt-item">
          <input
            type="checkbox"
            className="jp-mod-styled"
            checked={this._checked.has(kernel_id)}
            onChange={toggle}
          />
          <span className="jp-gpu-ckpt-item-title" title={path ?? undefined}>
            {path ? formatName(path, trans) : kernel.display_name}
          </span>
          <span className="jp-gpu-ckpt-item-side">
            {formatSize(state.size)}
          </span>
          <span
            className="jp-gpu-ckpt-item-detail"
            title={Time.format(state.created)}
          >
            {[
              trans.__(
                '%1, saved %2',
                kernel.display_name,
                formatAge(state.created, trans)
              ),
              kernel.why === 'hibernated'
                ? trans.__('Hibernated, ready to wake')
                : reasonText(state, trans)
            ].join(' · ')}
          </span>
          <span className="jp-gpu-ckpt-item-side">
            {kernel.server
              ? trans.__('server %1 on %2', kernel.server, kernel.node)
              : kernel.node}
          </span>
          {kernel.damaged.length > 0 && (
            <span className="jp-gpu-ckpt-item-detail">
              {trans._n(
                'A newer saved state is damaged.',
                '%1 newer saved states are damaged.',
                kernel.damaged.length,
                kernel.damaged.length
              )}
            </span>
          )}
        </label>
        {this._checked.has(kernel_id) && (
          <div className="jp-gpu-ckpt-item-gpus">
            <StateGpus
              gpu={this._gpus.get(kernel_id) ?? null}
              chosen={this.gpuMaps.get(kernel_id) ?? {}}
              onChoose={chosen => {
                this.gpuMaps.set(kernel_id, chosen);
                this.update();
              }}
              trans={trans}
            />
          </div>
        )}
        <ItemOutside outside={state.outside} trans={trans} />
      </li>
    );
  }

  private _checked: Set<string>;
  private _gpus = new Map<string, ISavedGpus>();
}

/** What of a lost kernel will not come back with it. */
function ItemOutside(props: IOutsideProps): JSX.Element | null {
  const closed = closedLine(props.outside, props.trans);
  return hasOutside(props.outside) ? (
    <div className="jp-gpu-ckpt-item-outside">
      {closed && <p className="jp-gpu-ckpt-closed">{closed}</p>}
      <StateOutside {...props} />
    </div>
  ) : null;
}

/**
 * Ask which lost kernels to restore, and onto which GPUs where there is a choice.
 *
 * @returns what the user chose, `null` for "not now"
 */
export async function showLostDialog(
  kernels: ILostKernel[],
  read: ReadState,
  trans: TranslationBundle
): Promise<ILostChoice | null> {
  const body = new LostBody(kernels, read, trans);
  const result = await namedDialog(trans.__('Restore Lost Kernels'), {
    body,
    buttons: [
      Dialog.cancelButton({
        label: trans.__('Not Now'),
        caption: trans.__('Ask again when the page is loaded anew')
      }),
      Dialog.createButton({
        label: trans.__('Dismiss'),
        caption: trans.__(
          'Do not ask again for the selected kernels; their saved states stay'
        ),
        className: DISMISS_CLASS,
        accept: false,
        actions: ['dismiss']
      }),
      Dialog.okButton({
        label: trans.__('Restore'),
        className: 'jp-gpu-ckpt-restore-lost',
        actions: ['restore']
      })
    ]
  }).launch();

  const action = result.button.actions[0] as 'restore' | 'dismiss' | undefined;
  return action
    ? { action, kernels: body.selected, gpuMaps: body.gpuMaps }
    : null;
}
