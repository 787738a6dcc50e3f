const jestJupyterLab = require('@jupyterlab/testutils/lib/jest-config');

// Packages published as ES modules only, which jest must transform.
const esModules = [
  '@codemirror',
  '@jupyter/react-components',
  '@jupyter/web-components',
  '@jupyter/ydoc',
  '@jupyterlab/',
  '@microsoft/',
  'exenv-es6',
  'lib0',
  'nanoid',
  'vscode-ws-jsonrpc',
  'y-protocols',
  'y-websocket',
  'yjs'
].join('|');

const baseConfig = jestJupyterLab(__dirname);

module.exports = {
  ...baseConfig,
  automock: false,
  collectCoverageFrom: ['src/**/*.{ts,tsx}', '!src/**/__tests__/*'],
  coverageReporters: ['text-summary'],
  reporters: ['default'],
  // Below this folder only: the checkout itself may lie below some other `lib`.
  testPathIgnorePatterns: ['<rootDir>/lib/', '/node_modules/'],
  testRegex: 'src/.*\\.spec\\.tsx?$',
  transformIgnorePatterns: [`/node_modules/(?!${esModules}).+`]
};
