import { Dialog } from '@jupyterlab/apputils';

/**
 * Make a dialog that screen readers call by its title: JupyterLab names only
 * those whose body is a plain text.
 */
export function namedDialog<T>(
  title: string,
  options: Omit<Partial<Dialog.IOptions<T>>, 'title'>
): Dialog<T> {
  const dialog = new Dialog<T>({ ...options, title });
  dialog.node.setAttribute('aria-label', title);
  return dialog;
}
