import type { BookLine, BooksView } from "../contract.ts"
import { usePane } from "../context.ts"
import { useGet } from "../load.ts"
import { bytes, count, percent, tiny } from "../numbers.ts"
import { Bar, Figure } from "../parts/Amount.tsx"
import { Waiting } from "../parts/Waiting.tsx"
import { Words } from "../parts/Words.tsx"

/** The audit: do the books balance, what do they cover, how finely, and what do they weigh? */
export function BooksPage() {
  const { source, run } = usePane()
  const loaded = useGet(source, "books", {})
  const twin = source.link("books", {})
  return (
    <div class="narrow" data-testid="books">
      <h1>The books</h1>
      <p class="lead">
        Every parameter has a book: the rows that training wrote into it. Added up they must give
        the change from the first weights to the last; what they miss is the remainder.
      </p>
      <Waiting of={loaded} doing="Auditing the books" />
      {loaded.value && <Audit books={loaded.value} />}
      <h2>The run</h2>
      <dl class="facts">
        {Object.entries(run.facts).map(([name, value]) => (
          <div>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {twin && (
        <p>
          <a
            class="twin"
            href={twin}
            target="_blank"
            rel="noreferrer"
            aria-label="The books as JSON"
          >
            JSON
          </a>
        </p>
      )}
    </div>
  )
}

function Audit({ books }: { books: BooksView }) {
  const lossy = books.attributed !== null && books.attributed < 1
  const titles = ["Book", "Shape", "Rows", "Granularity", "Remainder", "Bytes"]
  if (lossy) titles.push("Attributed to samples")
  return (
    <>
      <dl class="facts large">
        <div>
          <dt>Remainder, relative</dt>
          <dd>
            <Figure value={books.remainder} text={tiny(books.remainder)} testid="books-remainder" />
          </dd>
        </div>
        <div>
          <dt>Parameters covered</dt>
          <dd>
            <Figure
              value={books.coverage}
              text={`${+(100 * books.coverage).toFixed(2)} %`}
              testid="coverage"
            />
          </dd>
        </div>
        {lossy && (
          <div>
            <dt>Attributed to samples</dt>
            <dd>
              <Figure
                value={books.attributed}
                text={percent(books.attributed)}
                testid="books-attributed"
              />
            </dd>
          </div>
        )}
        <div>
          <dt>On disk</dt>
          <dd>
            <Figure value={books.bytes} text={bytes(books.bytes)} testid="books-bytes" />
          </dd>
        </div>
      </dl>
      {books.verdict && (
        <p class="verdict" data-testid="books-verdict">
          <Words text={`Of the remainder: ${books.verdict}.`} />
        </p>
      )}
      {lossy && (
        <p data-testid="books-nobody">
          The books balance, but not all of them is divided among samples:{" "}
          {percent(1 - (books.attributed ?? 1))} of the change of the weights belongs to no sample.
          It is what summaries and rounded rows leave out, and what was kept by step.
        </p>
      )}
      <div class="scrolls" tabIndex={0} role="region" aria-label="The books">
        <table class="books">
          <caption class="hidden">The books, one a parameter</caption>
          <thead>
            <tr>
              {titles.map((title) => (
                <th scope="col">{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {books.books.map((book) => (
              <Row key={book.name} book={book} lossy={lossy} />
            ))}
          </tbody>
        </table>
      </div>
    </>
  )
}

function Row({ book, lossy }: { book: BookLine; lossy: boolean }) {
  return (
    <tr data-testid={`book-${book.name}`}>
      <th scope="row">{book.name}</th>
      <td>{book.shape.join(" × ")}</td>
      <td>
        <Figure value={book.rows} text={count(book.rows)} />
      </td>
      <td>
        {book.granularity}
        {book.reason && (
          <span class="small reason">
            <Words text={book.reason} />
          </span>
        )}
      </td>
      <td>
        <Figure value={book.remainder} text={tiny(book.remainder)} />
      </td>
      <td>
        <Figure value={book.bytes} text={bytes(book.bytes)} />
      </td>
      {lossy && (
        <td class="share">
          <Figure value={book.attributed} text={percent(book.attributed)} />
          <Bar share={book.attributed ?? 0} both={false} />
        </td>
      )}
    </tr>
  )
}
