# Reads the Rust files of one crate, given as FILE arguments below the folder `root`; prints the modules of each folder
# with their imports from each other, and each circle. Ends with 1 if there is a circle. Used by scripts/check-imports.
#
# A module is a path of names ("" is the crate root). Only items that are built without tests and fuzzing count.

# --- From text to tokens -----------------------------------------------------------------------------------------------

# without_text(line): the line without comments, strings and characters; `inside` has the state of one that spans
# several lines.
function without_text(line,   code, at, found) {
    code = ""
    while (line != "") {
        if (inside == "comment") { line = after_comment(line); continue }
        if (inside == "string") { line = after_string(line); continue }
        at = match(line, /\/\/|\/\*|"|'/)
        if (!at) return code line
        found = substr(line, at, RLENGTH)
        code = code substr(line, 1, at - 1)
        line = substr(line, at + RLENGTH)
        if (found == "//") return code
        if (found == "/*") { inside = "comment"; nested = 1 }
        else if (found == "\"") { code = begin_string(code) }
        else { line = after_quote(line) }
    }
    return code
}

function after_comment(line) {
    if (!match(line, /\/\*|\*\//)) return ""
    nested += substr(line, RSTART, 2) == "/*" ? 1 : -1
    if (nested == 0) inside = ""
    return substr(line, RSTART + 2)
}

# `hashes` is -1 for a string with escapes, else the number of # that close the raw string.
function begin_string(code) {
    inside = "string"
    hashes = -1
    if (match(code, /(^|[^A-Za-z0-9_])[bc]?r#*$/)) {
        hashes = gsub(/#/, "#", code) ? length(code) - length(without_hashes(code)) : 0
    }
    return code " "
}

function without_hashes(code) { sub(/#*$/, "", code); return code }

function after_string(line,   close_at, closing, i) {
    if (hashes < 0) {
        while (match(line, /["\\]/)) {
            if (substr(line, RSTART, 1) == "\"") { inside = ""; return substr(line, RSTART + 1) }
            line = substr(line, RSTART + 2)
        }
        return ""
    }
    closing = "\""
    for (i = 0; i < hashes; i++) closing = closing "#"
    close_at = index(line, closing)
    if (!close_at) return ""
    inside = ""
    return substr(line, close_at + length(closing))
}

# After a single quote: a character is dropped, a lifetime stays without its quote.
function after_quote(line) {
    if (match(line, /^(\\[^'][^']*|\\'|[^\\']|[^ -~][^ -~]*)'/)) return substr(line, RLENGTH + 1)
    return line
}

function read_line(code) {
    while (match(code, /[A-Za-z_][A-Za-z0-9_]*|::|[^ \t]/)) {
        read_token(substr(code, RSTART, RLENGTH))
        code = substr(code, RSTART + RLENGTH)
    }
}

# --- From tokens to modules, names and paths ---------------------------------------------------------------------------

function is_name(token) { return token ~ /^[A-Za-z_]/ }

function read_token(token) {
    if (attribute_depth) { read_attribute(token); return }
    if (previous == "#" && token == "[" || before_previous == "#" && previous == "!" && token == "[") {
        attribute_depth = 1; attribute = ""; whole_file = previous == "!"
    } else if (use_text != "" || token == "use") {
        read_use(token)
    } else {
        read_code(token)
    }
    remember(token)
}

function remember(token) { before_previous = previous; previous = token }

function read_attribute(token) {
    if (token == "[") attribute_depth++
    if (token == "]" && --attribute_depth == 0) {
        if (attribute ~ /^cfg\((all\()?(test|fuzzing)[,)]/ || attribute ~ /^cfg\(any\((test|fuzzing),(test|fuzzing)\)\)/) {
            if (whole_file) left_out[module] = 1
            else if (!skipping) begin_skip()
        }
        previous = before_previous = ""
        return
    }
    attribute = attribute token
}

# Leaves out the next item: up to its `;`, to the `}` that ends it, or for a field or a variant to its `,`.
function begin_skip() { skipping = 1; skip_depth = depth; skip_kind = ""; skip_opened = 0 }

function read_skipped(token) {
    if (skip_kind == "" && is_name(token)) skip_kind = token
    if (skip_kind == "mod" && previous == "mod") left_out[join(module, token)] = 1
    if (token == "{") { skip_opened = 1 }
    if (depth + brackets <= skip_depth && (token == ";" || token == "}" && skip_opened)) skipping = 0
    if (depth < skip_depth) skipping = 0
    if (token == "," && depth + brackets == skip_depth && skip_kind !~ /^(fn|pub|impl|struct|enum|trait|type|const|static|unsafe|async)$/) skipping = 0
}

function count_brackets(token) {
    if (token == "{") depth++
    else if (token == "}") depth--
    else if (token == "(" || token == "[") brackets++
    else if (token == ")" || token == "]") brackets--
}

function read_use(token) {
    if (use_text == "") { use_line = FNR; use_text = " "; return }
    if (token != ";") { use_text = use_text (token == "as" ? " as " : token); return }
    if (!skipping) expand_use(substr(use_text, 2), "")
    else if (depth <= skip_depth) skipping = 0
    use_text = ""
}

# a::{b as c, d::{self, *}} names a::b as c, a::d and all of a::d.
function expand_use(tree, prefix,   open, inner, i, level, start, character) {
    open = index(tree, "{")
    if (!open) { import(prefix tree); return }
    prefix = prefix substr(tree, 1, open - 1)
    inner = substr(tree, open + 1, length(tree) - open - 1)
    level = 0; start = 1
    for (i = 1; i <= length(inner) + 1; i++) {
        character = substr(inner, i, 1)
        if (character == "{") level++
        if (character == "}") level--
        if ((character == "," || character == "") && level == 0) {
            if (i > start) expand_use(substr(inner, start, i - start), prefix)
            start = i + 1
        }
    }
}

function import(path,   name) {
    sub(/^::/, "extern::", path)
    name = path
    if (match(path, / as /)) { name = substr(path, RSTART + 4); path = substr(path, 1, RSTART - 1) }
    sub(/::self$/, "", path); sub(/::self$/, "", name)
    sub(/^.*::/, "", name)
    note_path(path, use_line)
    if (depth != module_depth[level_of]) return
    if (name == "*") globs[module] = globs[module] " " path
    else alias[module, name] = path
}

function read_code(token) {
    count_brackets(token)
    if (skipping) { read_skipped(token); return }
    if (token == "{" && opening != "") { enter_module(opening) }
    else if (token == "}" && depth < module_depth[level_of]) { leave_module() }
    if (opening != "" && token == ";") { declared[join(module, opening)] = 1 }
    opening = ""
    if (is_name(token)) {
        if (previous == "mod") opening = token
        else if (depth == module_depth[level_of] && (previous ~ /^(struct|enum|union|trait|type|fn|const|static)$/ || before_previous == "macro_rules"))
            defined[module, token] = 1
    }
    read_path(token)
}

function enter_module(name) { module = join(module, name); exists[module] = 1; module_depth[++level_of] = depth }
function leave_module() { level_of--; sub(/(::)?[^:]*$/, "", module) }

# Paths in code: `crate::a::B`, `super::c()`, `d::e`. `pub(in …)` contains none.
function read_path(token) {
    if (path_open && (token == "::" || previous == "::" && is_name(token))) {
        path_text = path_text token
        return
    }
    if (path_open && path_text ~ /::/) note_path(path_text, path_line)
    path_open = 0
    if (is_name(token) && previous !~ /^(\.|::|fn|struct|mod)$/ && !(previous == "in" && before_previous == "(")) { path_open = 1; path_text = token; path_line = FNR }
}

function note_path(path, line) {
    sub(/::$/, "", path)
    if (path !~ /::/ && path !~ /^[a-z]/) return
    if ((module, path) in noted) return
    noted[module, path] = 1
    count++
    path_from[count] = module; path_to[count] = path; path_at[count] = FILENAME ":" line
}

function join(left, right) { return left == "" ? right : left "::" right }

function begin_file(   path) {
    path = substr(FILENAME, length(root) + 2)
    sub(/\.rs$/, "", path)
    sub(/(^|\/)(mod|lib|main)$/, "", path)
    gsub(/\//, "::", path)
    module = path; exists[module] = 1; file_of[module] = FILENAME
    level_of = 0; module_depth[0] = 0; depth = brackets = skipping = attribute_depth = path_open = nested = 0
    inside = use_text = opening = previous = before_previous = ""
}

FNR == 1 { begin_file() }
{ read_line(without_text($0)) }
END { report() }

# --- From paths to the modules that define what they name --------------------------------------------------------------

function parent(name) { return sub(/(::)?[^:]*$/, "", name) ? name : "" }

# resolve(from, path): the module of the crate that defines the item which `path` names in the module `from`; "-" for
# another crate.
function resolve(from, path, tries,   names, n, i, at, rest, j, found) {
    if (tries > 12) return "-"
    n = split(path, names, "::")
    at = from
    for (i = 1; i <= n && names[i] ~ /^(crate|self|super)$/; i++) {
        if (names[i] == "crate") at = ""
        if (names[i] == "super") at = parent(at)
    }
    for (j = i; j <= n; j++) {
        if (names[j] == "*") return at
        if (join(at, names[j]) in exists) { at = join(at, names[j]); continue }
        rest = ""
        for (found = j + 1; found <= n; found++) rest = rest "::" names[found]
        if ((at, names[j]) in alias && alias[at, names[j]] != path) return resolve(at, alias[at, names[j]] rest, tries + 1)
        if ((at, names[j]) in defined) return at
        found = through_glob(at, names[j], tries)
        if (found != "-") return found
        return j == 1 ? "-" : at
    }
    return at
}

function through_glob(at, name, tries,   list, n, i, target) {
    n = split(globs[at], list, " ")
    for (i = 1; i <= n; i++) {
        target = resolve(at, list[i], tries + 1)
        if (target == "-" || target == at) continue
        if ((target, name) in defined) return target
        if ((target, name) in alias) return resolve(target, name, tries + 1)
    }
    return "-"
}

function is_left_out(name,   names, n, i, at) {
    n = split(name, names, "::")
    for (i = 1; i <= n; i++) {
        at = join(at, names[i])
        if (at in left_out || names[i] == "tests" || names[i] == "fuzzing") return 1
    }
    return ""
}

# --- From imports to folders and circles -------------------------------------------------------------------------------

# An import between two modules is an arrow between the two siblings that contain them; there is no arrow if one
# contains the other.
function add_arrow(from, to, where,   a, b, na, nb, i, folder) {
    na = split(from, a, "::"); nb = split(to, b, "::")
    folder = ""
    for (i = 1; i <= na && i <= nb && a[i] == b[i]; i++) folder = join(folder, a[i])
    if (i > na || i > nb || (folder, a[i], b[i]) in arrow) return
    arrow[folder, a[i], b[i]] = where
    targets[folder, a[i]] = targets[folder, a[i]] " " b[i]
}

function report(   i, target, name, circles) {
    for (i = 1; i <= count; i++) {
        if (is_left_out(path_from[i])) continue
        target = resolve(path_from[i], path_to[i], 0)
        if (target != "-" && !is_left_out(target)) add_arrow(path_from[i], target, path_at[i])
    }
    for (name in exists) if (name != "" && !is_left_out(name)) members[parent(name)] = members[parent(name)] " " last(name)
    circles = report_folder("", "")
    exit circles > 0
}

function last(name) { sub(/^.*::/, "", name); return name }

# Prints modules from the users to the used; those of a circle come last, in the order of their names.
function report_folder(folder, indent,   list, n, i, circles, name) {
    n = in_order(folder, list)
    circles = report_circles(folder)
    for (i = 1; i <= n; i++) {
        name = list[i]
        print indent "  " name (targets[folder, name] != "" ? " → " listed(targets[folder, name]) : "")
        if (join(folder, name) in members) circles += report_folder(join(folder, name), indent "    ")
    }
    return circles
}

function listed(names,   list, n) { n = sorted(names, list); return joined(list, n, ", ") }

function joined(list, n, between,   i, text) {
    for (i = 1; i <= n; i++) text = text (i > 1 ? between : "") list[i]
    return text
}

function sorted(names, list,   n, i, j, name) {
    n = split(names, list, " ")
    for (i = 2; i <= n; i++) {
        name = list[i]
        for (j = i - 1; j > 0 && list[j] > name; j--) list[j + 1] = list[j]
        list[j + 1] = name
    }
    return n
}

function in_order(folder, list,   names, n, i, taken, users, done, found) {
    n = sorted(members[folder], names)
    done = 0
    do {
        found = 0
        for (i = 1; i <= n; i++) {
            if (names[i] in taken || is_used(folder, names, n, taken, names[i])) continue
            list[++done] = names[i]; taken[names[i]] = 1; found = 1
        }
    } while (found)
    for (i = 1; i <= n; i++) if (!(names[i] in taken)) list[++done] = names[i]
    return done
}

function is_used(folder, names, n, taken, name,   i) {
    for (i = 1; i <= n; i++) if (!(names[i] in taken) && (folder, names[i], name) in arrow) return 1
    return 0
}

# For each module that reaches itself, a shortest circle through it; each circle once.
function report_circles(folder,   list, n, i, circle, key, seen, circles, steps, j, k) {
    n = sorted(members[folder], list)
    for (i = 1; i <= n; i++) {
        circle = shortest_circle(folder, list[i])
        if (circle == "") continue
        key = listed(circle)
        if (key in seen) continue
        seen[key] = 1; circles++
        k = split(circle, steps, " ")
        printf "circle in %s: %s → %s\n", folder == "" ? package : package "::" folder, joined(steps, k, " → "), steps[1] > "/dev/stderr"
        for (j = 1; j <= k; j++) {
            key = steps[j % k + 1]
            printf "    %s imports %s: %s\n", steps[j], key, arrow[folder, steps[j], key] > "/dev/stderr"
        }
    }
    return circles + 0
}

function shortest_circle(folder, start,   queue, first, end, way, next_names, n, i) {
    queue[1] = start; way[start] = start; end = 1
    for (first = 1; first <= end; first++) {
        n = sorted(targets[folder, queue[first]], next_names)
        for (i = 1; i <= n; i++) {
            if (next_names[i] == start) return way[queue[first]]
            if (next_names[i] in way) continue
            way[next_names[i]] = way[queue[first]] " " next_names[i]
            queue[++end] = next_names[i]
        }
    }
    return ""
}
