import { Dialog } from '@jupyterlab/apputils';

const FOCUSABLE =
  'button:enabled, input:enabled, select:enabled, textarea:enabled, a[href], [tabindex="0"]';

/**
 * Make a dialog that screen readers call by its title, and in which Tab goes
 * round through all there is.
 *
 * JupyterLab names only dialogs whose body is a plain text, and looks for the
 * first thing to focus before React has made the body: Tab would pass it over.
 */
export function namedDialog<T>(
  title: string,
  options: Omit<Partial<Dialog.IOptions<T>>, 'title'>
): Dialog<T> {
  const dialog = new Dialog<T>({ ...options, title });
  dialog.node.setAttribute('aria-label', title);
  // Added before the dialog's own listener, which is added when it is shown.
  dialog.node.addEventListener('keydown', goRound, true);
  dialog.node.addEventListener('keydown', leaveEnter, true);
  return dialog;
}

/**
 * Enter presses a button of the body, and opens what is folded there: some
 * versions of JupyterLab would accept the dialog.
 */
function leaveEnter(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  if (
    event.key === 'Enter' &&
    target.closest('.jp-Dialog-body') &&
    target.matches('button, summary')
  ) {
    event.stopImmediatePropagation();
  }
}

/** From the last thing to the first, and back with Shift. */
function goRound(event: KeyboardEvent): void {
  if (event.key !== 'Tab') {
    return;
  }
  const all = (event.currentTarget as HTMLElement).querySelectorAll(FOCUSABLE);
  const [from, to] = event.shiftKey
    ? [all[0], all[all.length - 1]]
    : [all[all.length - 1], all[0]];
  event.stopImmediatePropagation();
  if (document.activeElement === from) {
    event.preventDefault();
    (to as HTMLElement).focus();
  }
}
