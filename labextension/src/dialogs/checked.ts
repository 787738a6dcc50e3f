import { ReactWidget } from '@jupyterlab/ui-components';
import type { Message } from '@lumino/messaging';

/**
 * A dialog's body that decides whether the dialog can be accepted: while it
 * shows something of class `jp-mod-error`, the accepting buttons are disabled.
 */
export abstract class CheckedBody extends ReactWidget {
  protected override onUpdateRequest(msg: Message): void {
    super.onUpdateRequest(msg);
    // The dialog looks for errors when something is entered into it.
    void this.renderPromise?.then(() => {
      this.node.dispatchEvent(new Event('input', { bubbles: true }));
      this.onChecked();
    });
  }

  /** Called after the dialog has enabled or disabled its accepting buttons. */
  protected onChecked(): void {
    // Nothing more to decide.
  }
}
