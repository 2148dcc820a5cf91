// Runs one WASI program under node, with the rest of the arguments: cargo's runner for wasm32-wasip1 tests. The programs see the
// file system, because some read the committed vectors.
//
// CI starts it with `--single-threaded`: otherwise node 20 ends by SIGSEGV in the middle of a long program, always in the
// same test, whatever compiler of node has made the machine code.
//
// The program runs in a child, which tells its exit code before it ends: node 20 itself crashes now and then on its way
// out (SIGSEGV after the last line of a long program), and that says nothing about the program.
import { fork } from "node:child_process";
import { readFile } from "node:fs/promises";
import process, { argv, env, exit } from "node:process";
import { WASI } from "node:wasi";

if (process.send === undefined) {
  let code;
  const child = fork(argv[1], argv.slice(2));
  child.on("message", (said) => (code = said));
  child.on("exit", (status, signal) => {
    if (code === undefined && signal !== null) {
      console.error(`node itself was ended by ${signal}`);
    }
    exit(code ?? status ?? 1);
  });
} else {
  const wasi = new WASI({ version: "preview1", args: argv.slice(2), env, preopens: { "/": "/" }, returnOnExit: true });
  const module = await WebAssembly.compile(await readFile(argv[2]));
  const instance = await WebAssembly.instantiate(module, wasi.getImportObject());
  const code = wasi.start(instance);
  process.send(code, () => exit(code));
}
