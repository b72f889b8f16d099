"""Self-contained HTML pages: charts as inline SVG, tables that sort and filter, the sentences at the top."""
