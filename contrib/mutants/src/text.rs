//! Pieces of a source text, and their replacements.

use syn::{BinOp, GenericArgument, PathArguments, ReturnType, Type};

const SHOWN_MAX: usize = 90;

/// The text without line breaks.
pub(crate) fn flat(text: &str) -> String {
    let mut lines = text.split('\n');
    let mut flat = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        let line = line.trim_start();
        if !flat.ends_with(['(', ' ', '.']) && !line.starts_with(['.', ')', '?']) {
            flat.push(' ');
        }
        flat += line;
    }
    flat
}

/// The beginning and the end of the text.
pub(crate) fn short(text: &str) -> String {
    let count = text.chars().count();
    if count <= SHOWN_MAX {
        return text.to_owned();
    }
    let part = |from: usize| text.chars().skip(from).take(SHOWN_MAX / 2).collect::<String>();
    format!("{} … {}", part(0), part(count - SHOWN_MAX / 2))
}

/// Whether the text cannot be joined into one line.
pub(crate) fn has_comment(text: &str) -> bool {
    text.contains("//") || (text.contains('\n') && text.contains('"'))
}

/// The tokens of a piece of syntax, without spaces.
pub(crate) fn tokens(meta: &syn::Meta) -> String {
    match meta {
        syn::Meta::Path(path) => joined(path),
        syn::Meta::List(list) => format!("{}({})", joined(&list.path), list.tokens),
        syn::Meta::NameValue(value) => joined(&value.path),
    }
}

fn joined(path: &syn::Path) -> String {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect::<Vec<_>>().join("::")
}

pub(crate) fn type_name(of: &Type) -> String {
    match of {
        Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()).unwrap_or_default(),
        Type::Reference(reference) => type_name(&reference.elem),
        _ => "_".to_owned(),
    }
}

/// The replacements of an operator. For a condition that is `forced` true and false by other mutants, only those that
/// move its bound.
pub(crate) fn other_operators(operator: &str, forced: bool) -> &'static [&'static str] {
    match (operator, forced) {
        ("<", false) => &["<=", ">="],
        ("<=", false) => &["<", ">"],
        (">", false) => &[">=", "<="],
        (">=", false) => &[">", "<"],
        ("<", true) => &["<="],
        ("<=", true) => &["<"],
        (">", true) => &[">="],
        (">=", true) => &[">"],
        ("==", false) => &["!="],
        ("!=", false) => &["=="],
        ("+", _) => &["-"],
        ("-", _) => &["+"],
        ("*", _) => &["/"],
        ("/", _) => &["*"],
        ("%", _) => &["/"],
        ("<<", _) => &[">>"],
        (">>", _) => &["<<"],
        ("&", _) => &["|"],
        ("|", _) => &["&"],
        ("^", _) => &["&"],
        ("+=", _) => &["-="],
        ("-=", _) => &["+="],
        ("*=", _) => &["/="],
        ("|=", _) => &["&="],
        ("&=", _) => &["|="],
        ("<<=", _) => &[">>="],
        (">>=", _) => &["<<="],
        _ => &[],
    }
}

pub(crate) fn is_compound(operator: &BinOp) -> bool {
    use BinOp::*;
    matches!(
        operator,
        AddAssign(_)
            | SubAssign(_)
            | MulAssign(_)
            | DivAssign(_)
            | RemAssign(_)
            | BitAndAssign(_)
            | BitOrAssign(_)
            | BitXorAssign(_)
            | ShlAssign(_)
            | ShrAssign(_)
    )
}

/// The method to call instead of `name` with this number of arguments.
pub(crate) fn other_method(name: &str, arguments: usize) -> Option<&'static str> {
    Some(match (name, arguments) {
        ("min", 1) => "max",
        ("max", 1) => "min",
        ("is_some", 0) => "is_none",
        ("is_none", 0) => "is_some",
        ("is_ok", 0) => "is_err",
        ("is_err", 0) => "is_ok",
        ("any", 1) => "all",
        ("all", 1) => "any",
        ("saturating_sub", 1) => "wrapping_sub",
        ("wrapping_add", 1) => "wrapping_sub",
        ("wrapping_sub", 1) => "wrapping_add",
        ("push_back", 1) => "push_front",
        ("push_front", 1) => "push_back",
        ("pop_front", 0) => "pop_back",
        ("pop_back", 0) => "pop_front",
        _ => return None,
    })
}

/// Values that a function with this result may return at once.
pub(crate) fn values_of(output: &ReturnType) -> Vec<&'static str> {
    match output {
        ReturnType::Default => vec!["()"],
        ReturnType::Type(_, of) => values(of),
    }
}

fn values(of: &Type) -> Vec<&'static str> {
    let Type::Path(path) = of else { return Vec::new() };
    let Some(last) = path.path.segments.last() else { return Vec::new() };
    match last.ident.to_string().as_str() {
        "bool" => vec!["true", "false"],
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" | "i32" | "i64" | "isize" => vec!["0", "1"],
        "Option" => vec!["None"],
        "Vec" => vec!["Vec::new()"],
        "String" => vec!["String::new()"],
        "Result" => match argument(&last.arguments) {
            Some(Type::Tuple(unit)) if unit.elems.is_empty() => vec!["Ok(())"],
            Some(Type::Path(path)) if path.path.is_ident("bool") => vec!["Ok(true)", "Ok(false)"],
            Some(Type::Path(path))
                if path.path.segments.last().is_some_and(|last| last.ident == "Option") =>
            {
                vec!["Ok(None)"]
            }
            _ => Vec::new(),
        },
        _ => Vec::new(),
    }
}

fn argument(arguments: &PathArguments) -> Option<&Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else { return None };
    match arguments.args.first()? {
        GenericArgument::Type(first) => Some(first),
        _ => None,
    }
}

/// Whether a type is an integer.
pub(crate) fn is_whole_number(of: &Type) -> bool {
    values(of) == ["0", "1"]
}
