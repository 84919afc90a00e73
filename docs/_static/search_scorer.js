// Weights of search results: a guide answers a question before a record of decisions does.
// Sphinx reads this file by html_search_scorer; the other numbers are Sphinx's own.

const FOLDER_WEIGHTS = [
  [/^(concepts\/index|parallelize|train|save-and-load|debug|extend|evidence|reference\/index)$/, 0.2],
  [/^how-to\//, 4],
  [/^troubleshooting$/, 4.5],
  [/^(quickstart|install|coming-from-torch|performance)$/, 3],
  [/^concepts\//, 3],
  [/^(guides|glossary|differences|contributing|releasing)$/, 0.6],
  [/^(adr\/|where\/|changelog$|op_coverage$|module_coverage$|architectures$|faults$|device_stalls$)/, 0.2],
  [/_parity$/, 0.2],
];

var Scorer = {
  // result: [docname, title, anchor, description, score, file name, kind]
  score: (result) => {
    // A function or class that has the name is an answer; the whole page of a package is not.
    if (result[0].startsWith("reference/shoal_")) return result[4] * (result[6] === "object" ? 1.5 : 0.8);
    const found = FOLDER_WEIGHTS.find(([pattern]) => pattern.test(result[0]));
    return result[4] * (found ? found[1] : 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
