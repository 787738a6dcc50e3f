import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget, ToolbarButtonComponent } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';
import * as React from 'react';

import type { IFace } from './face';
import { faceOf } from './face';
import type { KernelStates } from './model';

/** How often, in milliseconds, the age of a state is shown anew. */
const AGE_INTERVAL = 20_000;

interface IButtonProps {
  face: IFace;
  onClick: () => void;
}

/**
 * A toolbar button that stays focusable and clickable while it is
 * `aria-disabled`, so that keyboard and screen reader reach the reason.
 */
function SaveButton(props: IButtonProps): JSX.Element {
  const { face, onClick } = props;
  const ref = React.useRef<HTMLSpanElement>(null);

  React.useEffect(() => {
    const button = ref.current?.querySelector('.jp-ToolbarButtonComponent');
    const disabled = face.state === 'unavailable';
    button?.setAttribute('aria-disabled', String(disabled));
    // The visible label is too short to name the button.
    button?.setAttribute('aria-label', face.title);
  });

  return (
    <>
      <span ref={ref} className="jp-gpu-ckpt-button-control">
        <ToolbarButtonComponent
          icon={face.icon}
          label={face.label}
          tooltip={face.title}
          noFocusOnClick={true}
          onClick={onClick}
        />
      </span>
      <span className="jp-gpu-ckpt-hidden" role="status" aria-live="polite">
        {face.announcement}
      </span>
    </>
  );
}

/** The notebook toolbar's button: saves the kernel's state and shows it. */
export class SaveButtonWidget extends ReactWidget {
  constructor(options: SaveButtonWidget.IOptions) {
    super();
    this.addClass('jp-ToolbarButton');
    this.addClass('jp-gpu-ckpt-button');
    this._sessionContext = options.sessionContext;
    this._model = options.model;
    this._trans = options.trans;
    this._onClick = options.onClick;

    this._sessionContext.kernelChanged.connect(this._onKernelChanged, this);
    this._sessionContext.sessionChanged.connect(this._onKernelChanged, this);
    this._sessionContext.statusChanged.connect(this._onStatusChanged, this);
    this._model.changed.connect(this._onModelChanged, this);
    this._onKernelChanged();
  }

  override dispose(): void {
    if (this.isDisposed) {
      return;
    }
    window.clearInterval(this._timer);
    this._sessionContext.kernelChanged.disconnect(this._onKernelChanged, this);
    this._sessionContext.sessionChanged.disconnect(this._onKernelChanged, this);
    this._sessionContext.statusChanged.disconnect(this._onStatusChanged, this);
    this._model.changed.disconnect(this._onModelChanged, this);
    super.dispose();
  }

  protected override render(): JSX.Element {
    const face = this._face();
    this.node.dataset.state = face.state;
    return (
      <SaveButton
        face={face}
        onClick={() => this._onClick(this._kernelId, this._face())}
      />
    );
  }

  protected override onAfterAttach(msg: Message): void {
    super.onAfterAttach(msg);
    window.clearInterval(this._timer);
    this._timer = window.setInterval(() => this.update(), AGE_INTERVAL);
  }

  protected override onBeforeDetach(msg: Message): void {
    window.clearInterval(this._timer);
    super.onBeforeDetach(msg);
  }

  private _face(): IFace {
    const id = this._kernelId;
    // A kernel that is being started has no id yet, and nothing is known of it.
    const none = !id && this._sessionContext.hasNoKernel;
    return faceOf(none ? null : this._model.entry(id ?? ''), this._trans);
  }

  private _onKernelChanged(): void {
    const id = this._sessionContext.session?.kernel?.id ?? null;
    if (id !== this._kernelId) {
      this._kernelId = id;
      if (id) {
        void this._model.refresh(id);
      }
    }
    this.update();
  }

  private _onStatusChanged(_: ISessionContext, status: Kernel.Status): void {
    const id = this._kernelId;
    const kernel = id && this._model.entry(id).kernel;
    if (!kernel || status !== 'idle') {
      return;
    }
    // A restart ends this, and no event tells of it.
    const { execution_state, gpu_lost, parked } = kernel;
    if (parked || gpu_lost || execution_state === 'hibernated') {
      void this._model.refresh(kernel.id);
    }
  }

  private _onModelChanged(_: KernelStates, kernelId: string): void {
    if (kernelId === this._kernelId) {
      this.update();
    }
  }

  private _kernelId: string | null = null;
  private _model: KernelStates;
  private _onClick: (kernelId: string | null, face: IFace) => void;
  private _sessionContext: ISessionContext;
  private _timer = 0;
  private _trans: TranslationBundle;
}

export namespace SaveButtonWidget {
  export interface IOptions {
    sessionContext: ISessionContext;
    model: KernelStates;
    trans: TranslationBundle;
    /** Called on a click, with the kernel and the face that was clicked. */
    onClick: (kernelId: string | null, face: IFace) => void;
  }
}
