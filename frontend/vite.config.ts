// Two builds of one program: a classic script for pages, which a report can inline under its hash,
// and an ES module for notebooks. Names carry no hashes: Python serves them by name.
import { defineConfig } from "vite"

const outDir = "../src/dualform/explore/assets"

export default defineConfig(({ mode }) => ({
  publicDir: false,
  define: { "process.env.NODE_ENV": '"production"' },
  build: {
    outDir,
    emptyOutDir: false,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    rolldownOptions: {
      input: mode === "widget" ? "src/widget.tsx" : "src/main.tsx",
      preserveEntrySignatures: "strict",
      output: {
        format: mode === "widget" ? "es" : "iife",
        entryFileNames: `${mode}.js`,
        assetFileNames: `${mode}.[ext]`,
      },
    },
  },
}))
