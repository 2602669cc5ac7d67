// Runs the site's search worker, the file that a browser loads, on its index: node search_site.js SITE < queries.json
// Prints, for each query, the numbers of the first entries that the search box would show.
const fs = require("fs")
const vm = require("vm")

const site = process.argv[2]
const workers = site + "/assets/javascripts/workers/"
const source = fs.readdirSync(workers).find(name => name.startsWith("search"))
const queries = JSON.parse(fs.readFileSync(0, "utf8"))
// A new object for each query, as the browser's copy is: the worker changes it.
const no_filter = () => ({
  input: { type: "operator", data: { operator: "and", operands: [] } },
  aggregation: { input: [{ type: "term", data: { field: "tags" } }] },
})
const READY = 1, ASK = 2, ANSWER = 3
const answers = {}
let asked

const worker = {
  postMessage(message) {
    if (message.type === ANSWER) answers[asked] = message.data.items.map(item => Number(item.id))
    if (message.type !== ANSWER && message.type !== READY) return
    asked = queries.shift()
    if (asked === undefined) process.stdout.write(JSON.stringify(answers))
    else setImmediate(() => worker.onmessage({ data: { type: ASK, data: { input: asked, filter: no_filter() } } }))
  },
}
vm.runInNewContext(fs.readFileSync(workers + source, "utf8"), { self: worker })
worker.onmessage({ data: { type: 0, data: JSON.parse(fs.readFileSync(site + "/search.json", "utf8")) } })
