// Ask the search of the built site thirty questions, and print the first result of each.
//   node tools/search_questions.js [docs/_build/html]
// The questions are titles of public issues and phrases of users; search_questions.json has the pages that answer each.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = process.argv[2] || "docs/_build/html";
const questions = JSON.parse(fs.readFileSync(path.join(__dirname, "search_questions.json")));

// The parts of a browser that Sphinx's scripts touch while they are loaded.
const page = {
  document: { addEventListener() {}, readyState: "complete", querySelector: () => null, getElementById: () => null },
  window: {},
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  console,
  _ready() {},
  _: (text) => text,
};
vm.createContext(page);
const scripts = ["documentation_options", "base-stemmer", "english-stemmer", "language_data", "searchtools"];
for (const script of scripts) {
  vm.runInContext(fs.readFileSync(`${site}/_static/${script}.js`, "utf8"), page);
}
vm.runInContext('globalThis.Stemmer = typeof Stemmer === "undefined" ? EnglishStemmer : Stemmer', page);
const index = fs.readFileSync(`${site}/searchindex.js`, "utf8");
vm.runInContext(index.replace(/^Search\.setIndex/, "Search._index = "), page);

let answered = 0;
for (const [question, pages] of questions) {
  page.question = question;
  const results = vm.runInContext("Search._performSearch(...Search._parseQuery(question))", page);
  // The best result comes last.
  const [found, title] = results[results.length - 1] || ["nothing", ""];
  const right = pages.some((name) => found.startsWith(name));
  answered += right ? 1 : 0;
  console.log(`${right ? "   " : "not"}  ${question}  ->  ${found} (${title})`);
}
console.log(`${answered} of ${questions.length} questions are answered by the first result`);
