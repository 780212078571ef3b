//! Finds the changes that can be made to a source. They keep types; `tree` leaves out those that do not compile
//! nevertheless.

use std::{collections::BTreeSet, ops::Range};

use syn::{
    Attribute, BinOp, Block, Expr, ExprLit, Item, Lit, Local, Pat, ReturnType, Signature, Stmt, Type, UnOp,
    spanned::Spanned,
    visit::{self, Visit},
};

use crate::{edit::Edits, mutant::Mutant, text};

/// The expression that asks whether a mutant is switched on, up to the mutant's number.
pub(crate) const ASKED: &str = "::tensorwire_testpoints::mutant(";

/// The changes of one file.
pub(crate) struct Sites<'a> {
    file: &'a str,
    source: &'a str,
    /// Names of integer constants.
    constants: &'a BTreeSet<String>,
    /// Mutants that are not to be made, by their key.
    left_out: &'a BTreeSet<String>,
    pub(crate) next_number: usize,
    /// Types and functions around the present expression.
    path: Vec<String>,
    /// Whether the present expression is in a function, and so runs when the program does.
    runs: bool,
    is_async: bool,
    /// Conditions that already get mutants which make them true and false.
    forced: BTreeSet<(usize, usize)>,
    /// Variables that are declared without a value.
    unset: BTreeSet<String>,
    /// The field that the present expression sets, and the range of its value.
    field: Option<(String, Range<usize>)>,
    keys: BTreeSet<String>,
    pub(crate) mutants: Vec<Mutant>,
    pub(crate) edits: Edits,
}

impl<'a> Sites<'a> {
    /// The mutants of `file`, whose numbers begin with `next_number`.
    ///
    /// # Errors
    /// The source is not Rust.
    pub(crate) fn of(
        file: &'a str,
        source: &'a str,
        constants: &'a BTreeSet<String>,
        left_out: &'a BTreeSet<String>,
        next_number: usize,
    ) -> syn::Result<Self> {
        let mut sites = Self {
            file,
            source,
            constants,
            left_out,
            next_number,
            path: Vec::new(),
            runs: false,
            is_async: false,
            forced: BTreeSet::new(),
            unset: BTreeSet::new(),
            field: None,
            keys: BTreeSet::new(),
            mutants: Vec::new(),
            edits: Edits::default(),
        };
        sites.visit_file(&syn::parse_file(source)?);
        Ok(sites)
    }

    /// Records a mutant, unless it is left out. Returns the expression that asks for it.
    fn mutant(&mut self, at: &impl Spanned, what: String) -> Option<String> {
        let number = self.next_number;
        // A mutant that is left out keeps its number, so that only its own file is built again.
        self.next_number += 1;
        let line = at.span().start().line;
        let (file, function) = (self.file.to_owned(), self.path.join("::"));
        let mut mutant = Mutant { number, file, line, function, what };
        for time in 2.. {
            if self.keys.insert(mutant.key()) {
                break;
            }
            let end = mutant.what.find(", time ").unwrap_or(mutant.what.len());
            mutant.what.truncate(end);
            mutant.what += &format!(", time {time}");
        }
        if self.left_out.contains(&mutant.key()) {
            return None;
        }
        self.mutants.push(mutant);
        Some(format!("{ASKED}{number})"))
    }

    fn text(&self, range: Range<usize>) -> String {
        text::flat(&self.source[range])
    }

    fn shown(&self, range: Range<usize>) -> String {
        text::short(&self.text(range))
    }

    /// `expr` becomes each of `others` in turn.
    fn replace(&mut self, expr: &Expr, others: &[String]) {
        let range = expr.span().byte_range();
        if text::has_comment(&self.source[range.clone()]) {
            return;
        }
        let shown = match &self.field {
            Some((name, value)) if *value == range => format!("{name}: {}", self.shown(range.clone())),
            _ => self.shown(range.clone()),
        };
        let mut before = String::from("(");
        for other in others {
            if let Some(asked) = self.mutant(expr, format!("`{shown}` becomes `{}`", text::short(other))) {
                before += &format!("if {asked} {{ {other} }} else ");
            }
        }
        if before.len() > 1 {
            self.edits.wrap(range, before + "{ ", " })");
        }
    }

    /// A condition of an `if` or a guard: made false, made true.
    fn force(&mut self, condition: &Expr, never: bool, always: bool) {
        let range = condition.span().byte_range();
        self.forced.insert((range.start, range.end));
        let shown = self.shown(range.clone());
        if has_let(condition) {
            if let Some(asked) = self.mutant(condition, format!("never `{shown}`")) {
                let first = first_operand(condition).span().byte_range().start;
                self.edits.wrap(first..first, format!("!{asked} && "), "");
            }
            return;
        }
        if never && let Some(asked) = self.mutant(condition, format!("never `{shown}`")) {
            self.edits.wrap(range.clone(), format!("(!{asked} && ("), "))");
        }
        if always && let Some(asked) = self.mutant(condition, format!("always `{shown}`")) {
            self.edits.wrap(range, format!("({asked} || ("), "))");
        }
    }

    fn is_forced(&self, expr: &Expr) -> bool {
        let range = expr.span().byte_range();
        self.forced.contains(&(range.start, range.end))
    }

    /// The operands of `&&` become true, those of `||` false.
    fn clauses(&mut self, binary: &syn::ExprBinary) {
        let is_and = matches!(binary.op, BinOp::And(_));
        for operand in [&*binary.left, &*binary.right] {
            let same = matches!(operand, Expr::Binary(inner) if matches!(inner.op, BinOp::And(_)) == is_and
                && matches!(inner.op, BinOp::And(_) | BinOp::Or(_)));
            if !same && !has_let(operand) && !matches!(operand, Expr::Macro(_)) {
                self.force(operand, !is_and, is_and);
            }
        }
    }

    fn operators(&mut self, whole: &Expr, binary: &syn::ExprBinary) {
        let range = whole.span().byte_range();
        let operator = binary.op.span().byte_range();
        let (left, right) = (self.text(range.start..operator.start), self.text(operator.end..range.end));
        let others: Vec<_> = text::other_operators(&self.source[operator], self.is_forced(whole))
            .iter()
            .map(|other| format!("{left}{other}{right}"))
            .collect();
        if !others.is_empty() {
            self.replace(whole, &others);
        }
    }

    fn literal(&mut self, whole: &Expr, literal: &ExprLit) {
        match &literal.lit {
            Lit::Int(number) => {
                let Ok(value) = number.base10_parse::<u64>() else { return };
                if !number.suffix().starts_with('f') && value != u64::MAX && value != u64::from(u8::MAX) {
                    self.replace(whole, &[format!("{}{}", value + 1, number.suffix())]);
                }
            }
            Lit::Bool(value) => self.replace(whole, &[(!value.value).to_string()]),
            _ => {}
        }
    }

    fn method(&mut self, whole: &Expr, call: &syn::ExprMethodCall) {
        let name = call.method.to_string();
        let range = whole.span().byte_range();
        if name == "is_empty" && !self.is_forced(whole) {
            let other = format!("!{}", self.text(range));
            return self.replace(whole, &[other]);
        }
        let Some(other) = text::other_method(&name, call.args.len()) else { return };
        if self.is_forced(whole) && name.starts_with("is_") {
            return;
        }
        let method = call.method.span().byte_range();
        let other =
            format!("{}{other}{}", self.text(range.start..method.start), self.text(method.end..range.end));
        self.replace(whole, &[other]);
    }

    fn function(&mut self, signature: &Signature, block: &Block, attributes: &[Attribute]) {
        if is_for_tests(attributes) || signature.constness.is_some() {
            return;
        }
        self.path.push(signature.ident.to_string());
        let was = (self.runs, self.is_async, std::mem::take(&mut self.unset));
        (self.runs, self.is_async) = (true, signature.asyncness.is_some());
        for value in text::values_of(&signature.output) {
            if let Some(asked) = self.mutant(&signature.ident, format!("gives {value} at once")) {
                let place = block.brace_token.span.open().byte_range().end;
                self.edits.wrap(place..place, format!(" if {asked} {{ return {value}; }}"), "");
            }
        }
        let only = matches!(signature.output, ReturnType::Default) && block.stmts.len() == 1;
        if only && matches!(block.stmts.first(), Some(Stmt::Expr(expr, _)) if can_be_dropped(expr)) {
            // Without its only statement the function would be the same as with the mutant that returns () at once.
            visit::visit_block(self, block);
        } else {
            self.visit_block(block);
        }
        (self.runs, self.is_async, self.unset) = was;
        self.path.pop();
    }

    fn statement(&mut self, statement: &Stmt) {
        let Stmt::Expr(expr, Some(_)) = statement else { return };
        let is_set_late = matches!(expr, Expr::Assign(assign)
            if matches!(&*assign.left, Expr::Path(path)
                if path.path.get_ident().is_some_and(|name| self.unset.contains(&name.to_string()))));
        let is_drop = matches!(expr, Expr::Call(call)
            if matches!(&*call.func, Expr::Path(path)
                if path.path.segments.last().is_some_and(|name| name.ident == "drop")));
        if !can_be_dropped(expr) || is_set_late || (is_drop && self.is_async) {
            return;
        }
        let range = statement.span().byte_range();
        let what = format!("without `{}`", self.shown(range.clone()));
        if let Some(asked) = self.mutant(statement, what) {
            self.edits.wrap(range, format!("if !{asked} {{ "), " }");
        }
    }
}

impl<'ast> Visit<'ast> for Sites<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = match item {
            Item::Mod(module) => (&module.attrs, None),
            Item::Impl(block) => {
                if block.trait_.as_ref().is_some_and(|(_, path, _)| {
                    path.segments.last().is_some_and(|name| name.ident == "Debug" || name.ident == "Display")
                }) {
                    return;
                }
                (&block.attrs, Some(text::type_name(&block.self_ty)))
            }
            Item::Trait(definition) => (&definition.attrs, Some(definition.ident.to_string())),
            Item::Fn(function) => return self.function(&function.sig, &function.block, &function.attrs),
            _ => return,
        };
        if is_for_tests(attributes) {
            return;
        }
        self.path.extend(name.clone());
        let was = std::mem::replace(&mut self.runs, false);
        visit::visit_item(self, item);
        self.runs = was;
        if name.is_some() {
            self.path.pop();
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.function(&function.sig, &function.block, &function.attrs);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(block) = &function.default {
            self.function(&function.sig, block, &function.attrs);
        }
    }

    fn visit_block(&mut self, block: &'ast Block) {
        for statement in &block.stmts {
            self.statement(statement);
        }
        visit::visit_block(self, block);
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if local.init.is_none() {
            let pattern = if let Pat::Type(typed) = &local.pat { &*typed.pat } else { &local.pat };
            if let Pat::Ident(name) = pattern {
                self.unset.insert(name.ident.to_string());
            }
        }
        if local.attrs.is_empty() {
            visit::visit_local(self, local);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !arm.attrs.is_empty() {
            return;
        }
        if let Some((_, guard)) = &arm.guard {
            self.force(guard, true, true);
        }
        visit::visit_arm(self, arm);
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if let syn::Member::Named(name) = &field.member {
            self.field = Some((name.to_string(), field.expr.span().byte_range()));
        }
        visit::visit_field_value(self, field);
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        if !self.runs || has_attributes(expr) {
            return;
        }
        match expr {
            Expr::Macro(_) | Expr::Const(_) => return,
            // A bug that other tests plant.
            Expr::If(branch) if self.source[branch.cond.span().byte_range()].contains("planted!") => {
                if let Some((_, otherwise)) = &branch.else_branch {
                    self.visit_expr(otherwise);
                }
                return;
            }
            Expr::Repeat(repeat) => return self.visit_expr(&repeat.expr),
            Expr::Reference(reference) if matches!(&*reference.expr, Expr::Lit(_) | Expr::Path(_)) => return,
            Expr::If(branch) => self.force(&branch.cond, true, true),
            Expr::While(repeated) => self.force(&repeated.cond, true, false),
            Expr::Binary(binary) if matches!(binary.op, BinOp::And(_) | BinOp::Or(_)) => self.clauses(binary),
            Expr::Binary(binary) => self.operators(expr, binary),
            Expr::Lit(literal) => self.literal(expr, literal),
            Expr::MethodCall(call) => self.method(expr, call),
            Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_)) && !self.is_forced(expr) => {
                let other = self.text(unary.expr.span().byte_range());
                self.replace(expr, &[other]);
            }
            Expr::Path(path) => {
                if path.path.get_ident().is_some_and(|name| self.constants.contains(&name.to_string())) {
                    let other = format!("{} + 1", self.text(expr.span().byte_range()));
                    self.replace(expr, &[other]);
                }
                return;
            }
            _ => {}
        }
        visit::visit_expr(self, expr);
    }

    // Expressions in types are evaluated at compile time.
    fn visit_type(&mut self, _: &'ast Type) {}
    fn visit_pat(&mut self, _: &'ast Pat) {}
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_generics(&mut self, _: &'ast syn::Generics) {}
    fn visit_angle_bracketed_generic_arguments(&mut self, _: &'ast syn::AngleBracketedGenericArguments) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let words = text::tokens(&attribute.meta);
        words.ends_with("test")
            || (words.starts_with("cfg") && (words.contains("test") || words.contains("fuzzing")))
    })
}

fn has_attributes(expr: &Expr) -> bool {
    match expr {
        Expr::MethodCall(call) => !call.attrs.is_empty(),
        Expr::Call(call) => !call.attrs.is_empty(),
        Expr::Block(block) => !block.attrs.is_empty(),
        _ => false,
    }
}

fn can_be_dropped(expr: &Expr) -> bool {
    match expr {
        Expr::MethodCall(_) | Expr::Call(_) | Expr::Await(_) | Expr::Try(_) | Expr::Assign(_) => {
            !has_attributes(expr)
        }
        Expr::Binary(binary) => text::is_compound(&binary.op),
        _ => false,
    }
}

/// Whether a condition binds something.
fn has_let(condition: &Expr) -> bool {
    match condition {
        Expr::Let(_) => true,
        Expr::Binary(binary) if matches!(binary.op, BinOp::And(_)) => {
            has_let(&binary.left) || has_let(&binary.right)
        }
        _ => false,
    }
}

fn first_operand(condition: &Expr) -> &Expr {
    match condition {
        Expr::Binary(binary) if matches!(binary.op, BinOp::And(_)) => first_operand(&binary.left),
        _ => condition,
    }
}
